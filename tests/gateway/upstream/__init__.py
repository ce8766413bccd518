"""Tests of connections to engines."""
