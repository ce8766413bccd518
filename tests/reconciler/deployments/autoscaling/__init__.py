"""Tests of reconciler.deployments.autoscaling."""
