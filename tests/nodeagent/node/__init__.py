"""Tests of nodeagent/node/."""
