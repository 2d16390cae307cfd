"""What a run would take before it is started: memory, time, and what other settings would give."""
