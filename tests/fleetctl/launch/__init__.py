"""Tests of `fleetctl launch` and `fleetctl proxy`."""
