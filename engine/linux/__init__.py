"""Linux-only parts of the engine."""
