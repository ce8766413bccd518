"""What the planner sees: frozen values. How they are made of the caches is views.py's job."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from reconciler.groups.epochs import Epoch
from reconciler.groups.group_view import GroupView
from reconciler.placement.inputs import Rival
from schemas.deployment import CanaryStatus, ModelDeployment, ModelSource, Revision
from schemas.meta import Condition
from schemas.node import AdapterReport, ModelReport, Taint
from schemas.replica import LeavingRank, Replica


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHold:
    """Why a node takes nothing new, whatever it is; `need` and `have` are what it is short of, in bytes."""

    reason: str
    message: str
    need: int = 0
    have: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One replica's rank on a node, whoever's it is."""

    replica: str
    deployment: str
    bytes: int
    priority: int = 0
    """Its deployment's."""
    version: int = 0
    """The mod_revision of the replica that was read."""
    is_ending: bool = False
    """Whether it drains already: its memory is on its way back."""
    nodes: tuple[str, ...] = ()
    """All nodes that have a rank of the replica, where there are several: they give it up together."""


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
    adapters: Mapping[str, AdapterReport] = field(default_factory=dict)
    """The same for LoRA adapters."""
    reserved_by_group: str = ""
    """The ShardGroup that keeps single-Mac replicas away."""
    replicas: Mapping[str, int] = field(default_factory=dict)
    """How many replicas of each deployment are assigned to it."""
    allocations: tuple[Allocation, ...] = ()
    """What is assigned to it, one by one."""
    promised_bytes: int = 0
    """What is kept for replicas of a higher priority, which wait for others to end."""
    chip: str = ""
    gpu_cores: int = 0
    memory_bytes: int = 0
    """Unified memory of the machine."""
    bandwidth_gbps: float = 0.0
    """How fast it reads its memory; 0 if nobody knows."""
    taints: tuple[Taint, ...] = ()
    pool_priority: int = 0
    """The highest among its pools."""
    holds: tuple[NodeHold, ...] = ()
    """Why nothing new is placed here (nodestate.py), the first to be told first."""
    leave: str = ""
    """Why what runs here should go elsewhere, as far as minAvailable allows; empty if it may stay."""

    def has_looked_at(self, source: ModelSource) -> bool:
        """Return whether its agent has looked at all folders of the model, whatever it found."""
        paths = {source.path} if source.draft is None else {source.path, source.draft.path}
        has_adapter = source.adapter is None or source.adapter in self.adapters
        return has_adapter and paths <= self.models.keys()

    @property
    def free_bytes(self) -> int:
        return self.allocatable_bytes - self.used_bytes

    @property
    def hardware(self) -> tuple[str, int, int]:
        """Return what the node is, as far as size goes."""
        return self.chip, self.gpu_cores, self.memory_bytes

    @property
    def ending_bytes(self) -> int:
        """Return what is used by replicas that drain."""
        return sum(tenant.bytes for tenant in self.allocations if tenant.is_ending)

    @property
    def room_bytes(self) -> int:
        """Return what may be assigned now: free, and not promised to somebody else."""
        return min(self.free_bytes, self.free_bytes + self.ending_bytes - self.promised_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """One replica of the deployment in question."""

    replica: Replica
    version: int
    """The mod_revision that was read."""
    is_ours: bool = True
    """Whether its owner is this very deployment, not an earlier one of the name."""
    is_ready: bool = False
    """Whether it has an endpoint, which lives as long as its node's lease."""
    reported_ready: bool = False
    """Whether its agent said last that it answers. While the agent is away nobody knows better: it is not idle."""
    is_stopped: bool = False
    """Whether nothing of it runs any more, as far as anybody can know: each agent says so, or is lost."""
    is_node_lost: bool = False
    """Whether a node of it has been away for longer than the grace period."""
    trouble: str = ""
    """What an agent of it says is wrong."""
    epoch: Epoch | None = None
    """How its ranks get on together; None where there is one."""
    away: frozenset[str] = frozenset()
    """Nodes of it whose agents renew no lease now."""
    leaving_ranks: tuple[LeavingRank, ...] = ()
    """Ranks of its earlier epochs that may still be there, as far as anybody knows."""

    @property
    def name(self) -> str:
        return self.replica.metadata.name

    @property
    def node(self) -> str:
        """Return the node of rank 0, which answers."""
        return self.replica.spec.ranks[0].node

    @property
    def nodes(self) -> frozenset[str]:
        """Return the nodes of all its ranks."""
        return frozenset(rank.node for rank in self.replica.spec.ranks)

    @property
    def is_idle(self) -> bool:
        """Return whether it serves nobody, as far as anybody knows."""
        return not self.is_ready and not self.reported_ready

    @property
    def ordinal(self) -> int:
        """Return the number in its name."""
        tail = self.name.rpartition("-")[2]
        return int(tail) if tail.isdigit() else 0

    @property
    def is_deleting(self) -> bool:
        return self.replica.metadata.deletion_timestamp is not None

    @property
    def is_orphan(self) -> bool:
        """Return whether nobody owns it: its deployment was deleted with --cascade=orphan."""
        return not self.replica.metadata.owner_references


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentView:
    """Everything that decides about one deployment."""

    name: str
    deployment: ModelDeployment | None
    """None if it is gone and only replicas of it are left."""
    replicas: tuple[ReplicaView, ...] = ()
    nodes: tuple[NodeView, ...] = ()
    apart_from: frozenset[str] = frozenset()
    """Deployments whose replicas must not be on the same node: its own wish, or theirs."""
    rivals: tuple[Rival, ...] = ()
    """What of a higher priority has no place yet, the highest first: it chooses before us."""
    desired: int | None = None
    """How many replicas autoscaling wants; None: it is not asked."""
    scaling: Condition | None = None
    """Why it wants so many."""
    revisions: tuple[Revision, ...] = ()
    """What was kept of what the replicas ran."""
    stable: str = ""
    """The version whose rollout was completed last, by hash; empty if none was."""
    canary: CanaryStatus | None = None
    """How far the trial of a version is."""
    groups: tuple[GroupView, ...] = ()
    """The ShardGroups that matter: those it names, or that its replicas run on; all of them for Auto."""
    requeue_after_s: float | None = None
    """When to look again though nothing changed: a grace period or a wait ends."""
    awaits_reports: bool = False
    """Whether ready nodes are still about to look at the model: placing now would be too early."""

    @property
    def wanted(self) -> int:
        """Return how many replicas there should be."""
        if self.deployment is None or self.is_ending:
            return 0
        return self.deployment.spec.replicas if self.desired is None else self.desired

    @property
    def is_ending(self) -> bool:
        """Return whether the deployment is being deleted."""
        return (
            self.deployment is not None and self.deployment.metadata.deletion_timestamp is not None
        )
