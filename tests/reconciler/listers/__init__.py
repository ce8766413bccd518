"""Tests of reconciler.listers."""
