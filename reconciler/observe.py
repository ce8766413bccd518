"""What the planner sees: frozen values. How they are read off the caches is fleet.py's job."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from schemas.deployment import ModelDeployment
from schemas.node import ModelReport
from schemas.replica import Replica


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One Mac as placement sees it."""

    name: str
    is_ready: bool
    is_cordoned: bool = False
    allocatable_bytes: int = 0
    """What models may use, after what its pools reserve."""
    reserved_bytes: int = 0
    """What its pools keep back of what its agent offers."""
    used_bytes: int = 0
    """What is assigned to it, running or not."""
    labels: Mapping[str, str] = field(default_factory=dict)
    pools: frozenset[str] = frozenset()
    models: Mapping[str, ModelReport] = field(default_factory=dict)
    """By path; a path that is missing has not been looked at yet."""
    reserved_by_group: str = ""
    """The ShardGroup that keeps single-Mac replicas away."""
    replicas: Mapping[str, int] = field(default_factory=dict)
    """How many replicas of each deployment are assigned to it."""

    @property
    def free_bytes(self) -> int:
        return self.allocatable_bytes - self.used_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """One replica of the deployment in question."""

    replica: Replica
    version: int
    """The mod_revision that was read."""
    is_ours: bool = True
    """Whether its owner is this very deployment, not an earlier one of the name."""
    is_ready: bool = False
    is_stopped: bool = False
    """Whether its agent reports that nothing of it runs."""
    is_node_lost: bool = False
    """Whether its node has been away for longer than the grace period."""
    trouble: str = ""
    """What its agent says is wrong."""

    @property
    def name(self) -> str:
        return self.replica.metadata.name

    @property
    def node(self) -> str:
        return self.replica.spec.ranks[0].node

    @property
    def is_deleting(self) -> bool:
        return self.replica.metadata.deletion_timestamp is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Everything that decides about one deployment."""

    name: str
    deployment: ModelDeployment | None
    """None if it is gone and only replicas of it are left."""
    replicas: tuple[ReplicaView, ...] = ()
    nodes: tuple[NodeView, ...] = ()
    next_look_s: float | None = None
    awaits_reports: bool = False
    """Whether ready nodes are still about to look at the model: placing now would be too early."""
    """When to look again though nothing changed: a grace period or a wait ends."""
