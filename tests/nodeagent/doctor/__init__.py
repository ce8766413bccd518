"""Tests of nodeagent/doctor/."""
