"""One gateway takes over from another."""
