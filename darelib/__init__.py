"""What the DARE merger is made of, one room for one job; dare.py is the front door, docs/contributing.md the map."""

__version__ = "0.1.0"
