"""Tests of the adapter that only looks."""
