"""Tests of engine.model."""
