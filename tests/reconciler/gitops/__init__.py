"""Tests of reconciler.gitops."""
