"""Sampling and tables of `fleetctl top`: current usage of nodes and models."""
