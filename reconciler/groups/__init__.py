"""Placement on ShardGroups: cables, model splits, and gang placement of all ranks of a replica. Pure.

Vocabulary:

- shape: one way to run on a group: as declared, or one of its fallbacks (`group_view.GroupShape`).
- form: how the ranks of a replica work together: backend, parallelism, port (`group_view.GroupForm`).
- epoch: one life of all ranks of a replica together; its states are a table in `epochs`.
- seat: the addresses and RDMA devices of one rank (`fabric.assign_seats`).
- gang: all ranks or none (`gang.GangPlacer`).
"""
