"""`fleetctl logs`: what engines, agents and gateways log, from the machine on which they run, without ssh."""
