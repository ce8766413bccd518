"""Tests of fleetctl/objects."""
