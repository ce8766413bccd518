"""Tests of reconciler.deployments.rollout."""
