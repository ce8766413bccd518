"""Maintenance of the fleet's Macs over ssh: upgrades and restarts, one Mac at a time."""
