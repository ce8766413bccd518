"""A simulated fleet: its file format and its run in virtual time. Accesses no real store."""
