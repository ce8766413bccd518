"""Tests of reconciler.services.gitops."""
