"""Faults on real etcd processes: what was acknowledged stays, and who watches misses nothing."""
