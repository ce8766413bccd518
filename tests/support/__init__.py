"""Helpers that tests share: real etcd, real fleets, tiny models."""
