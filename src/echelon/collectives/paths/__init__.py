"""One file for each path; its name is the spec name."""
