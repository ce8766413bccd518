"""Tests of `store.grpc`."""
