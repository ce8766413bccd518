"""Tests of compat."""
