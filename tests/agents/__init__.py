"""Tests with real coding agents."""
