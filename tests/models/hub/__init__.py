"""Tests of models/hub."""
