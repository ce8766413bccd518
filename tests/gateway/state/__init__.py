"""Tests of the fleet state, with and without the store."""
