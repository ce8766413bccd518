"""Tests of nodeagent/hardware/."""
