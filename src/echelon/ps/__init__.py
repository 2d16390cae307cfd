"""Parameter server: the servers that hold a model's parameters, and the workers' side of pushes and pulls."""
