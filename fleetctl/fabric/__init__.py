"""Admission checks and benchmarks of ShardGroups, for `fleetctl fabric`."""
