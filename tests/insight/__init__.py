"""Tests of insight/."""
