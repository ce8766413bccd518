"""Tests of reconciler.deployments.demand."""
