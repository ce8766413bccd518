"""`fleetctl fabric`: whether the Macs of a group are cabled and set up to work as one, and how fast they are."""
