"""Tests of `store.etcd.grpc`."""
