"""Tests of reconciler/placement."""
