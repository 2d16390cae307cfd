"""`python -m echelon`, also under torchrun."""

from echelon.cli import main

if __name__ == "__main__":
    main()
