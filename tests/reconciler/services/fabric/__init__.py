"""Tests of reconciler.services.fabric."""
