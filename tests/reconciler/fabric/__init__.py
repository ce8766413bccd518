"""Tests of reconciler.fabric."""
