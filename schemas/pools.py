"""NodePool and ShardGroup: which Macs belong together, and what is kept back on them."""

from typing import Annotated, Literal

from pydantic import Field

from schemas import quantity
from schemas.meta import ApiModel, ApiObject, Labels, ObjectName, Status
from schemas.node import Node, effective_labels, matches
from schemas.quantity import Quantity


class NodeSelector(ApiModel):
    """Which nodes belong to a pool; everything given must hold."""

    match_labels: Labels = Field(default_factory=dict)
    """Labels that a node must carry, all of them."""
    chips: tuple[str, ...] = ()
    """Chip names such as "Apple M4 Pro", any of them; empty means every chip."""
    min_memory: Quantity | None = None
    """The least unified memory of a node, such as "64Gi"."""


class Reserved(ApiModel):
    """What the fleet keeps its hands off, on every node of the pool."""

    memory: Quantity
    """Memory left to the owner of the Mac, such as "8Gi"."""


class NodePoolSpec(ApiModel):
    """Which Macs are in the pool."""

    nodes: tuple[ObjectName, ...] = ()
    """Nodes by name."""
    selector: NodeSelector | None = None
    """Nodes by their properties."""
    reserved: Reserved | None = None
    """What is left to the owners of the Macs."""
    priority: Annotated[int, Field(ge=0, le=100)] = 0
    """Which pool is filled first: of nodes that fit equally well, those of the higher priority are taken."""


class NodePoolStatus(Status):
    """What is true of a pool."""

    nodes: int = 0
    """Nodes in the pool."""
    ready_nodes: int = 0
    """Nodes in the pool whose agent is alive."""


class NodePool(ApiObject):
    """A named set of Macs."""

    kind: Literal["NodePool"] = "NodePool"
    spec: NodePoolSpec
    """Which Macs are in the pool."""
    status: NodePoolStatus | None = None
    """What is true; written by the reconciler."""


class GroupMember(ApiModel):
    """One Mac of a group; its place in the list is its rank."""

    node: ObjectName
    """The node."""


class ShardGroupSpec(ApiModel):
    """Which Macs are cabled into one."""

    members: Annotated[tuple[GroupMember, ...], Field(min_length=2)]
    """The Macs in rank order."""
    reservation: Literal["Shared", "Exclusive"] = "Shared"
    """Exclusive keeps single-Mac replicas off the members; Shared lets them in."""


class ShardGroupStatus(Status):
    """What is true of a group."""

    ready_members: int = 0
    """Members whose agent is alive."""


class ShardGroup(ApiObject):
    """Macs that are cabled into one bigger machine."""

    kind: Literal["ShardGroup"] = "ShardGroup"
    spec: ShardGroupSpec
    """Which Macs are cabled into one."""
    status: ShardGroupStatus | None = None
    """What is true; written by the reconciler."""


def in_pool(pool: NodePool, node: Node) -> bool:
    """Return whether the node belongs to the pool, by name or by its properties."""
    by_name = node.metadata.name in pool.spec.nodes
    return by_name or (pool.spec.selector is not None and _selects(pool.spec.selector, node))


def _selects(selector: NodeSelector, node: Node) -> bool:
    if node.status is None or not matches(effective_labels(node), selector.match_labels):
        return False
    if selector.chips and node.status.chip not in selector.chips:
        return False
    least = quantity.parse(selector.min_memory) if selector.min_memory else 0
    return node.status.memory_bytes >= least
