"""Attacks on the product and faults around it: each promise as a scenario whose outcome is said in words."""
