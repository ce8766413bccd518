"""The verbs of fleetctl, one module each."""
