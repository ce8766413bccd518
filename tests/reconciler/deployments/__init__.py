"""Tests of reconciler.deployments."""
