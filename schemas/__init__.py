"""The API kinds: what users declare and what the fleet reports. Types and pure helpers, without I/O."""
