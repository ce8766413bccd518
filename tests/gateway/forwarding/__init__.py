"""Tests of forwarding: admission, retries, health and resumption."""
