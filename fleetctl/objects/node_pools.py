"""Pools of nodes and their reserve, for tables: trees, because the types take longer to import than a table to print."""

from collections.abc import Sequence
from typing import NamedTuple

from fleetctl.objects.selectors import tree_labels
from schemas import sizes
from store import object_trees
from store.object_trees import Tree, field_at
from store.reads import StoreReader


class NodePools(NamedTuple):
    """The pools of one node."""

    names: tuple[str, ...] = ()
    reserved_bytes: int = 0
    """Memory that they reserve for the owner; the largest reserve counts, as in placement."""


async def read_node_pools(store: StoreReader, nodes: Sequence[Tree]) -> dict[str, NodePools]:
    """Return the pools of the nodes that are in one, by the node's name. Raises StoreError."""
    pools = sorted(await object_trees.list_all(store, "NodePool"), key=object_trees.name_of)
    node_pools = {}
    for node in nodes if pools else ():
        mine = [pool for pool in pools if _in_pool(pool, node)]
        reserves = [field_at(pool, "spec", "reserved", "memory") for pool in mine]
        node_pools[object_trees.name_of(node)] = NodePools(
            names=tuple(map(object_trees.name_of, mine)),
            reserved_bytes=max(
                (sizes.parse(reserve) for reserve in reserves if reserve), default=0
            ),
        )
    return node_pools


def _in_pool(pool: Tree, node: Tree) -> bool:
    """Return whether a node is in a pool, as schemas.pools.in_pool."""
    if object_trees.name_of(node) in (field_at(pool, "spec", "nodes") or ()):
        return True
    selector, status = field_at(pool, "spec", "selector"), node.get("status")
    if selector is None or status is None:
        return False
    labels, wanted = tree_labels(node), selector.get("matchLabels") or {}
    chips, least = selector.get("chips"), selector.get("minMemory")
    return (
        all(labels.get(key) == value for key, value in wanted.items())
        and (not chips or status["chip"] in chips)
        and (not least or status["memoryBytes"] >= sizes.parse(least))
    )
