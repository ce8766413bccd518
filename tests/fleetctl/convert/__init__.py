"""Tests of fleetctl/convert."""
