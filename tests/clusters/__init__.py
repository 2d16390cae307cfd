"""Runs on real engines of clusters, each on this machine; skipped in words where an engine is absent."""
