"""Placement on single nodes: a memory proof, filters, scores and preemption. Pure: no clock, no I/O, no logging.

Vocabulary, in the order of use:

- request: one more replica of a deployment (`inputs.PlacementRequest`).
- node view: one Mac with its allocations (`inputs.NodeView`); all of them are columns of a table (`table.NodeTable`).
- memory proof: bytes that one rank needs on a node, part by part (`memory_proof`).
- filter: a reason why a node cannot take the replica (`filters`); its answer is a rejection.
- score: 0..100, why one node is better than another (`scores`), weighted by the deployment's profile.
- ranking: the nodes for one request, by score (`ranking`); the best one that fits is taken.
- assumed state: the table plus all decisions of this plan that are not written yet (`assumed_state`).
- preemption: victims of a lower priority that end to make room (`preemption`).
- unschedulable: the rejections of all nodes, counted by reason (`refusals`).
"""
