"""What `fleetctl.jsonpath` is made of: reading from left to right, and the steps of a path."""
