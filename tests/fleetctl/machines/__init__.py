"""Tests of machines that become nodes over ssh."""
