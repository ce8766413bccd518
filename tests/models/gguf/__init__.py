"""Tests of models/gguf."""
