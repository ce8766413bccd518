"""`fleetctl create`: objects that are not there yet, from manifests or from flags; and API keys."""
