"""Tests of reconciler.nodes."""
