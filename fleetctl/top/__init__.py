"""`fleetctl top`: what nodes and models use and do just now."""
