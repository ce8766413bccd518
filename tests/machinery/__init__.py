"""Tests of machinery/."""
