"""What is trained of a model: one file a kind, chosen by `--tune` and joined by `+`."""
