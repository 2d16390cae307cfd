"""How and when replicas agree: one file per strategy, found by its file's name. Importing this imports no torch."""
