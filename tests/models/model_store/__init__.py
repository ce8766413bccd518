"""Tests of models/model_store."""
