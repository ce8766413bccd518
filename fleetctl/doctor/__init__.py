"""Health checks of `fleetctl doctor`."""
