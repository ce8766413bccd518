"""Tests of `store.etcd`."""
