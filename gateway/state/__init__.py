"""What the gateway knows of the fleet: the store's objects as a routing table, kept while the store is away."""
