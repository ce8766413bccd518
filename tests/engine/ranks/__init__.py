"""Tests of engine.ranks: several processes as one engine."""
