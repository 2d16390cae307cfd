"""Using what a run has trained: files for other programs, predictions for new samples, a service."""
