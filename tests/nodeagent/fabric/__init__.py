"""Tests of nodeagent/fabric/."""
