"""Tests of fleetctl/, the command itself."""
