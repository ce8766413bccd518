"""Tests of nodeagent/."""
