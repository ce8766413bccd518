"""Tests of schemas/wire."""
