"""Tests of fleetctl/output."""
