"""`python -m penstock` is the `penstock` command."""

from penstock.cli import command

if __name__ == "__main__":
    command()
