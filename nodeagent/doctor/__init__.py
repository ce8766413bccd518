"""Health of the machine itself: host facts, and the checks of `fleetctl doctor` over them."""
