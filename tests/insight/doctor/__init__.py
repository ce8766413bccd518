"""Tests of insight/doctor."""
