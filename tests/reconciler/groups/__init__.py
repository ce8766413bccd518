"""Tests of reconciler.groups."""
