"""Tests of `store.http`."""
