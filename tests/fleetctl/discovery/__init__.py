"""Tests of `fleetctl.discovery`."""
