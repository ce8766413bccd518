"""A fleet in one process, in virtual time, with seeded mishaps. `python -m tests.simulation SEED` runs one seed."""
