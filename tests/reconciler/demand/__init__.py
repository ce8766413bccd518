"""Tests of reconciler.demand."""
