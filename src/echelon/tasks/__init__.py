"""Tasks: what a batch is, what its loss sums over, how a model is judged, what a report shows. One file a task."""
