"""Tests of reconciler/."""
