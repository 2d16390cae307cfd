"""Units, names, errors and the spec parser: standard library only."""
