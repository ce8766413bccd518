"""NodePool: a named set of Macs, the resources reserved for their owners, and when the fleet may use them."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from schemas import duration, quantity
from schemas.autoscaling import TimeZone
from schemas.duration import PositiveDuration
from schemas.memory import EngineMemory
from schemas.meta import ApiModel, ApiObject, Examples, Labels, ObjectName, Status
from schemas.node import Node, effective_labels, matches
from schemas.quantity import PositiveQuantity, Quantity


class NodeSelector(ApiModel):
    """The properties of the nodes of a pool; all given ones must match."""

    match_labels: Labels = Field(default_factory=dict)
    """Labels that a node must carry, all of them."""
    chips: tuple[str, ...] = ()
    """Chip names such as "Apple M4 Pro", any of them; empty means every chip."""
    min_memory: Quantity | None = None
    """The least unified memory of a node, such as "64Gi"."""


class ReservedResources(ApiModel):
    """Resources that the fleet does not use, on every node of the pool."""

    memory: Quantity = "0"
    """Memory reserved for the owner of the Mac, such as "8Gi"."""
    disk: Quantity = "0"
    """Disk space reserved for the owner, such as "50Gi"; with less free space, nothing new is placed."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.model_fields_set:
            raise ValueError("reserves nothing; write memory, disk or both, or leave it out")
        return self


TimeOfDay = Annotated[str, StringConstraints(pattern=r"^([01][0-9]|2[0-3]):[0-5][0-9]$")]


class DailyWindow(ApiModel):
    """A time of the day, on all days or some."""

    start: TimeOfDay
    """Their start, such as "22:00"."""
    end: TimeOfDay
    """Their end, such as "07:00": the next day if not later than `start`; the same time means a whole day."""
    days: tuple[Literal["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"], ...] = ()
    """Days on which they begin. Default: every day."""
    time_zone: TimeZone = "UTC"
    """The time zone of `start` and `end`."""


class PoolPolicy(ApiModel):
    """Times and conditions in which the fleet may use the pool's Macs; otherwise replicas are moved away."""

    quiet_hours: Annotated[tuple[DailyWindow, ...], Field(max_length=50)] = ()
    """Times in which the fleet does not use the pool's Macs: nothing runs here."""
    mains_only: bool = False
    """Nothing runs here while a Mac is on battery."""
    owner_active: Literal["Ignore", "Yield"] = "Ignore"
    """Yield: nothing runs on a Mac while its owner uses it: keyboard, mouse, camera or microphone; or while its lid is shut
    so that macOS would let it sleep."""
    after_panics: Literal["StartUnwired", "Withhold"] = "StartUnwired"
    """After two kernel panics within three days, Withhold: nothing runs on the Mac; StartUnwired: engines that start do
    not wire their models, whatever `memory` says."""


class PoolPower(ApiModel):
    """Sleep of the pool's Macs. A Mac needs wake on LAN, a cable, and another Mac of its network that stays awake."""

    mode: Literal["AlwaysOn", "SleepWhenIdle", "Schedule"] = "AlwaysOn"
    """AlwaysOn: they never sleep. SleepWhenIdle: a Mac sleeps after `idleTime` without a request, and is woken for requests
    and before hours of the week in which its models are usually used. Schedule: they sleep so outside of `awake` only,
    without that forecast. AlwaysOn goes first if several pools of a Mac differ."""
    idle_time: PositiveDuration | None = None
    """Time without a request for its models after which a Mac sleeps. Default: 15m; not with AlwaysOn."""
    awake: Annotated[tuple[DailyWindow, ...], Field(max_length=50)] = ()
    """Times in which the Macs are awake; with Schedule only."""

    @model_validator(mode="after")
    def _fits_mode(self) -> Self:
        if self.mode == "AlwaysOn" and self.idle_time is not None:
            raise ValueError("has idleTime, and mode AlwaysOn never sleeps; remove one")
        if (self.mode == "Schedule") != bool(self.awake):
            raise ValueError(
                "mode Schedule needs awake, and only Schedule has it; write both or none"
            )
        return self

    @property
    def idle_s(self) -> float:
        """Return `idleTime` in seconds."""
        return duration.parse(self.idle_time or "15m")


_LEAST_WIRED = "1Gi"


def _enough_to_wire(text: str) -> str:
    if quantity.parse(text) < quantity.parse(_LEAST_WIRED):
        raise ValueError(
            f"must be at least {_LEAST_WIRED}: less leaves no memory for a model; to set nothing, leave the field out"
        )
    return text


WiredLimitSize = Annotated[
    Quantity, AfterValidator(_enough_to_wire), Examples(("1Gi", "100Gi", "102400Mi"))
]


class NodePoolSpec(ApiModel):
    """The Macs of a pool, and how the fleet uses them."""

    nodes: tuple[ObjectName, ...] = ()
    """Nodes by name."""
    selector: NodeSelector | None = None
    """Nodes by their properties."""
    reserved: ReservedResources | None = None
    """Resources reserved for the owners of the Macs."""
    policy: PoolPolicy | None = None
    """Times and conditions in which the pool's Macs may be used. Default: always."""
    power: PoolPower | None = None
    """Sleep of the pool's Macs. Default: when macOS lets them; then a Mac that sleeps is lost to the fleet."""
    wired_limit: WiredLimitSize | None = None
    """Memory that the GPU of each Mac should be able to wire, such as "100Gi". Setting it needs root: a Mac with another
    limit gets the condition WiredLimitDiffers with the command. Placement uses the effective limit. Default: left alone."""
    memory: EngineMemory | None = None
    """The memory of engines that start from now on, unless their deployment has its own. Off counts if several pools of a
    Mac differ. Default: wired is Auto."""
    download_limit: PositiveQuantity | None = None
    """Bytes a second of model files that each Mac of the pool receives, from hubs and other Macs, such as "100M". The
    lowest limit of a Mac's pools counts. Default: no limit."""
    upload_limit: PositiveQuantity | None = None
    """Bytes a second of model files that each Mac of the pool sends to other Macs, such as "100M"; a tenth of it while
    an engine of the Mac generates. At most the agent's --upload-limit. Default: that flag."""
    model_disk_limit: PositiveQuantity | None = None
    """Bytes of models that each Mac of the pool keeps, such as "50G": above it, unused models are removed, the least
    recently used first. Models that are used, pinned, or were loaded within the last hour stay. The lowest limit of a
    Mac's pools counts. Default: no limit; models are removed when the disk is full."""
    priority: Annotated[int, Field(ge=0, le=100)] = 0
    """Of nodes that fit equally well, those of the pool with the higher priority are taken."""


class NodePoolStatus(Status):
    """The observed state of a pool."""

    nodes: int = 0
    """Nodes in the pool."""
    ready_nodes: int = 0
    """Nodes in the pool whose agent is alive."""


class NodePool(ApiObject):
    """A named set of Macs."""

    kind: Literal["NodePool"] = "NodePool"
    spec: NodePoolSpec
    """The Macs of the pool, and how the fleet uses them."""
    status: NodePoolStatus | None = None
    """The observed state; written by the reconciler."""


def in_pool(pool: NodePool, node: Node) -> bool:
    """Return whether the node belongs to the pool, by name or by its properties."""
    by_name = node.metadata.name in pool.spec.nodes
    return by_name or (pool.spec.selector is not None and selects(pool.spec.selector, node))


def selects(selector: NodeSelector, node: Node) -> bool:
    """Return whether the node matches the selector; a node that never reported does not."""
    if node.status is None or not matches(effective_labels(node), selector.match_labels):
        return False
    if selector.chips and node.status.chip not in selector.chips:
        return False
    least = quantity.parse(selector.min_memory) if selector.min_memory else 0
    return node.status.memory_bytes >= least
