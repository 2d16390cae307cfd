"""One file per built-in model, named as the model; each has `build(data: ModelInput) -> nn.Module`."""
