"""Programs that use the fleet's models: an address of this machine for them, and coding agents that are set up for it."""
