"""Files of models between the Macs of a fleet: one download from a hub, then the local network."""
