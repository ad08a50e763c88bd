"""What the DARE merger is made of, one room for one job; docs/contributing.md has the map."""

__version__ = "0.1.0"
