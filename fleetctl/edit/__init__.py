"""`fleetctl edit`: objects, or files of manifests, in the user's own editor."""
