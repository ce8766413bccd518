"""One module a verb of fleetctl."""
