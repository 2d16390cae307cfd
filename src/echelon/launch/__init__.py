"""Starting processes, here and under schedulers: entry points by name, no knowledge of training."""
