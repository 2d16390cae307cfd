"""Starting processes: on this machine, and under schedulers. Starts commands and entry points by name; knows no training."""
