"""Tests of engine/openai/."""
