"""Completion of fleetctl's words in the user's shell."""
