"""fleetctl's contexts: which fleets there are, and which one is meant."""
