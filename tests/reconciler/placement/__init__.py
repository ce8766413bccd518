"""Tests of reconciler.placement."""
