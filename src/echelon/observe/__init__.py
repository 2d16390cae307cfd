"""What a run did: phases, wire bytes, events, one JSONL record. Knows no strategy."""
