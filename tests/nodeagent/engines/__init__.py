"""Tests of nodeagent/engines/."""
