"""NodePool: which Macs belong together, and what is kept back on them."""

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from schemas import quantity
from schemas.autoscaling import TimeZone
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


class ReservedResources(ApiModel):
    """What the fleet keeps its hands off, on every node of the pool."""

    memory: Quantity = "0"
    """Memory left to the owner of the Mac, such as "8Gi"."""
    disk: Quantity = "0"
    """Disk space to be left free for the owner, such as "50Gi"; with less, nothing new is placed."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.model_fields_set:
            raise ValueError("reserves nothing; write memory, disk or both, or leave it out")
        return self


TimeOfDay = Annotated[str, StringConstraints(pattern=r"^([01][0-9]|2[0-3]):[0-5][0-9]$")]


class QuietHours(ApiModel):
    """A time of the day in which the pool's Macs belong to their owners alone."""

    start: TimeOfDay
    """When they begin, such as "22:00"."""
    end: TimeOfDay
    """When they end, such as "07:00": the day after, if that is not later than `start`; the same time is a whole day."""
    days: tuple[Literal["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"], ...] = ()
    """Days on which they begin; left out, every day."""
    time_zone: TimeZone = "UTC"
    """The time zone of both."""


class PoolPolicy(ApiModel):
    """When the pool's Macs may be used at all; outside of it replicas are moved away."""

    quiet_hours: Annotated[tuple[QuietHours, ...], Field(max_length=50)] = ()
    """Times in which nothing runs here."""
    mains_only: bool = False
    """Nothing runs here while a Mac is on battery."""
    owner_active: Literal["Ignore", "Yield"] = "Ignore"
    """Yield: nothing runs on a Mac while somebody sits at it."""


class NodePoolSpec(ApiModel):
    """Which Macs are in the pool."""

    nodes: tuple[ObjectName, ...] = ()
    """Nodes by name."""
    selector: NodeSelector | None = None
    """Nodes by their properties."""
    reserved: ReservedResources | None = None
    """What is left to the owners of the Macs."""
    policy: PoolPolicy | None = None
    """When the pool's Macs may be used; left out, always."""
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


def in_pool(pool: NodePool, node: Node) -> bool:
    """Return whether the node belongs to the pool, by name or by its properties."""
    by_name = node.metadata.name in pool.spec.nodes
    return by_name or (pool.spec.selector is not None and selects(pool.spec.selector, node))


def selects(selector: NodeSelector, node: Node) -> bool:
    """Return whether the node has what the selector asks for; one that never reported has not."""
    if node.status is None or not matches(effective_labels(node), selector.match_labels):
        return False
    if selector.chips and node.status.chip not in selector.chips:
        return False
    least = quantity.parse(selector.min_memory) if selector.min_memory else 0
    return node.status.memory_bytes >= least
