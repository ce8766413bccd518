"""The parts of `fleetctl simulate`."""
