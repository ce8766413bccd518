"""What `fleetctl describe` shows of each kind beside what all objects have."""
