"""The commands: each its options and its run."""
