"""Scenarios, a file for each kind of attack or fault; each file has `SCENARIOS`."""
