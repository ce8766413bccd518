"""The planner's input: one deployment and its replicas as frozen values; observe.py makes them from the caches."""

from dataclasses import dataclass, field

from reconciler.groups.epochs import Epoch
from reconciler.groups.group_view import GroupView
from reconciler.placement.inputs import NodeView, Rival
from reconciler.placement.table import NodeTable
from schemas.deployment import CanaryStatus, HubReference, ModelDeployment, Revision
from schemas.meta import Condition
from schemas.replica import LeavingRank, Replica


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """One replica of the deployment."""

    replica: Replica
    version: int
    """mod_revision of the replica that was read."""
    is_owned: bool = True
    """True if this deployment owns it, and not an earlier one of the same name."""
    is_ready: bool = False
    """True if it has an endpoint, which lives as long as its node's lease."""
    reported_ready: bool = False
    """True if the last report of its agent says Ready. It stays so while the agent is away: the engine may serve."""
    is_stopped: bool = False
    """True if every agent reports that its rank has stopped, or is lost."""
    cannot_start: bool = False
    """True if an agent failed several times in a row to start its engine."""
    is_node_lost: bool = False
    """True if one of its nodes has been away for longer than the grace period."""
    problem: str = ""
    """Problem that an agent reports, in one sentence."""
    epoch: Epoch | None = None
    """State of its current epoch; None for a replica with one rank."""
    away_nodes: frozenset[str] = frozenset()
    """Its nodes whose lease has expired."""
    is_fetching: bool = False
    """True if an agent fetches its model, and bytes arrive."""
    has_files: bool = False
    """True if each Mac reports that it has the files of its rank. Not reported while an engine runs."""
    leaving_ranks: tuple[LeavingRank, ...] = ()
    """Ranks of its earlier epochs that may still run."""

    @property
    def awaits_files(self) -> bool:
        """Return whether its ranks must not start before all Macs have their files."""
        formation = self.replica.spec.formation
        return formation is not None and formation.awaits_files

    @property
    def name(self) -> str:
        return self.replica.metadata.name

    @property
    def node(self) -> str:
        """Return the node of rank 0, which serves HTTP."""
        return self.replica.spec.ranks[0].node

    @property
    def nodes(self) -> frozenset[str]:
        """Return the nodes of all its ranks."""
        return frozenset(rank.node for rank in self.replica.spec.ranks)

    @property
    def is_idle(self) -> bool:
        """Return whether it serves no requests, by its endpoint and by its agent's last report."""
        return not self.is_ready and not self.reported_ready

    @property
    def ordinal(self) -> int:
        """Return the number at the end of its name."""
        tail = self.name.rpartition("-")[2]
        return int(tail) if tail.isdigit() else 0

    @property
    def is_deleting(self) -> bool:
        return self.replica.metadata.deletion_timestamp is not None

    @property
    def is_orphan(self) -> bool:
        """Return whether it has no owner: its deployment was deleted with --cascade=orphan."""
        return not self.replica.metadata.owner_references


@dataclass(frozen=True, slots=True, kw_only=True)
class PreloadView:
    """A preload in the store."""

    node: str
    source: HubReference
    """The commit that the node fetches, or has."""
    version: int
    """mod_revision of the preload that was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentView:
    """Everything that the plan for one deployment depends on."""

    name: str
    deployment: ModelDeployment | None
    """None if it is gone and only replicas of it are left."""
    replicas: tuple[ReplicaView, ...] = ()
    table: NodeTable = field(default_factory=lambda: NodeTable(()))
    """All nodes."""
    apart_from: frozenset[str] = frozenset()
    """Deployments whose replicas must not share a node with its own: it or they set antiAffinity."""
    rivals: tuple[Rival, ...] = ()
    """Missing replicas of deployments with a higher priority, the highest first: they are placed before."""
    autoscaled_replicas: int | None = None
    """Number of replicas that the autoscaler asks for; None without an autoscaler."""
    scaling: Condition | None = None
    """Condition that explains the autoscaler's number."""
    revisions: tuple[Revision, ...] = ()
    """The stored revisions of the deployment."""
    stable_template: str = ""
    """Hash of the version whose rollout completed last; empty if none did."""
    canary: CanaryStatus | None = None
    """State of the canary analysis."""
    groups: tuple[GroupView, ...] = ()
    """ShardGroups that it names or that its replicas run on; all of them for sharding: Auto."""
    requeue_after_s: float | None = None
    """Seconds until a grace period or a wait ends; None if only changes matter."""
    preloads: tuple[PreloadView, ...] = ()
    """Preloads of its model in the store, by node."""
    unresolved: Condition | None = None
    """Condition that says why the commit of the hub model is not known; None if it is."""
    awaits_reports: bool = False
    """True if ready nodes have not inspected the model yet, so that it is too early to place."""

    @property
    def has_model(self) -> bool:
        """Return whether it is known what replicas run: not before the first commit of a hub model is resolved."""
        return self.deployment is None or self.deployment.spec.model.folder != ""

    def preparing_nodes(self) -> tuple[NodeView, ...]:
        """Return the nodes with a replica that fetch the files of another version before it is replaced."""
        folders = {preload.node: preload.source.folder for preload in self.preloads}
        busy = {name for one in self.replicas if not one.is_deleting for name in one.nodes}
        return tuple(
            node
            for node in self.table.named(sorted(busy & folders.keys()))
            if node.missing_bytes(folders[node.name]) and not node.fetch_problem(folders[node.name])
        )

    @property
    def desired_replicas(self) -> int:
        """Return how many replicas there should be."""
        if self.deployment is None or self.is_ending:
            return 0
        if self.autoscaled_replicas is not None:
            return self.autoscaled_replicas
        return self.deployment.spec.replicas

    @property
    def is_ending(self) -> bool:
        """Return whether the deployment is being deleted."""
        return (
            self.deployment is not None and self.deployment.metadata.deletion_timestamp is not None
        )
