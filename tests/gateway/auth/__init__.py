"""Tests of API keys, rates and access control."""
