"""Tests of engine/api/."""
