"""Tests of the API adapters, with the official clients."""
