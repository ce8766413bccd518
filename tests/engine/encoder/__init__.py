"""Tests of encoders."""
