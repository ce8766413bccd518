"""Tests of fleetctl/top."""
