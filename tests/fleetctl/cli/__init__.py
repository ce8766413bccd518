"""Tests of fleetctl/cli."""
