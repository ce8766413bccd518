"""Tests of nodeagent/model_store/."""
