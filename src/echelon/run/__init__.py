"""A run from its description to its end: resolving, starting, resuming, and one process of it."""
