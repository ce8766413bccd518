"""Tests of `store.etcd.member`."""
