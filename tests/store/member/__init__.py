"""Tests of `store.member`."""
