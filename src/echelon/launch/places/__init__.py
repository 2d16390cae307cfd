"""Places that a run's processes can be started in: one file each."""
