"""`fleetctl chat`: talking with a model through a gateway, at a terminal or in a pipe."""
