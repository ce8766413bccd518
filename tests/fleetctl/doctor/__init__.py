"""Tests of fleetctl/doctor."""
