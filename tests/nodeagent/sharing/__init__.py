"""Tests of nodeagent/replicas/."""
