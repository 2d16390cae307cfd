"""One file per model family; each has `hints(model: nn.Module) -> Hints | None`: None for models of other families."""
