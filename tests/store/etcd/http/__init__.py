"""Tests of `store.etcd.http`."""
