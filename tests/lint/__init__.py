"""Checks that read the tree and run nothing of it: `make lint` runs them, and `make unit` does not."""
