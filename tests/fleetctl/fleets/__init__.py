"""Tests of fleetctl/fleets."""
