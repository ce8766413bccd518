"""Tests of fleetctl/chat."""
