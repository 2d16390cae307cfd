"""What the averaging strategies share: which values are averaged, how deltas travel, when."""
