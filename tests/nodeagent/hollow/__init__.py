"""Tests of nodeagent/hollow/."""
