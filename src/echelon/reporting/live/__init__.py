"""A run while it goes: what each rank uses, what the record says so far, a local page. Needs no torch."""
