"""Tests of reconciler.services."""
