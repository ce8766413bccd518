"""The facts that tables show beside the objects themselves."""

from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType
from typing import NamedTuple

from fleetctl.objects.node_pools import NodePools


class TableContext(NamedTuple):
    """The time, and of nodes what their own objects do not tell."""

    now: datetime
    ready_nodes: frozenset[str] = frozenset()
    node_pools: Mapping[str, NodePools] = MappingProxyType({})
