"""One file per codec: the file's name is the spec's name, `CODEC` its class."""
