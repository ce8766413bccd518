"""Tests of engine.linux."""
