"""Flows: steps that follow each other (prepare, train, fine-tune, evaluate, export) as one graph."""
