"""Who takes part in a run and who works on what: members, leases, the journal, evaluations. Knows no parameters."""
