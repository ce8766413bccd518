"""Tests of reconciler.rollout."""
