"""What a run writes of itself, line by line, and how it is read again. Knows no strategy and no task."""
