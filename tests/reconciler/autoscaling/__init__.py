"""Tests of reconciler.autoscaling."""
