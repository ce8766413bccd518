"""Tests of fleetctl/verbs."""
