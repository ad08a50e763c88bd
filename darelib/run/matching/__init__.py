"""Merges that are matched with a few examples of each skill."""
