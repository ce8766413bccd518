"""Tests of nodeagent/api/."""
