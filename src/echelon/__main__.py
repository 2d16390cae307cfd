"""`python -m echelon`, also under torchrun."""

from echelon.cli import command

if __name__ == "__main__":
    command()
