"""Faults on real etcd processes: acknowledged writes survive, and watchers miss nothing."""
