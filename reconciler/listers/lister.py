"""Queries about the fleet, answered from the caches. Nothing else reads the caches; nothing here writes."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from reconciler.groups.group_view import GroupView
from reconciler.listers.caches import (
    ANTI_AFFINITY,
    ASLEEP,
    BY_DEPLOYMENT,
    BY_HARDWARE,
    BY_KIND,
    BY_NODE,
    BY_PRIORITY,
    BY_RULE,
    PART_OF,
    REVISIONS,
    Caches,
)
from schemas.deployment import (
    ModelDeployment,
    ModelDeploymentStatus,
    Revision,
    last_version,
)
from schemas.meta import ApiObject, ObjectKey, Status
from schemas.model_snapshot import ModelSnapshot, PreloadAssignment, pinned
from schemas.modelpolicy import ModelPolicy
from schemas.node import Node, NodeLifeStatus, NodeStatus
from schemas.pools import NodePool, in_pool, selects
from schemas.replica import RankStatus, Replica
from schemas.shardgroup import ShardGroup
from store import keys

Obj = TypeVar("Obj", bound=ApiObject)

_NO_PEAK: Final = (0,)


class Lister:
    """Answers queries about the fleet. Cheap to make: it holds nothing but the caches."""

    def __init__(self, caches: Caches) -> None:
        self.caches = caches

    # Objects of any kind

    def spec(self, key: ObjectKey) -> ApiObject | None:
        return self.caches.specs.items.get(keys.spec_key(*key))

    def status(self, key: ObjectKey) -> Status | None:
        return self.caches.statuses.items.get(keys.status_key(*key))

    def spec_version(self, key: ObjectKey) -> int:
        """Return the mod_revision of the object's spec in the cache; 0 if there is none."""
        return self.caches.specs.version(keys.spec_key(*key))

    def of_kind(self, kind: str) -> Iterator[ApiObject]:
        """Return the objects of a kind by name."""
        return iter(self.caches.specs.by_index(BY_KIND, kind).values())

    def _all(self, kind: type[Obj]) -> Iterator[Obj]:
        """Return the objects of a kind by name."""
        return (item for item in self.of_kind(kind.__name__) if isinstance(item, kind))

    def is_readable(self, key: ObjectKey) -> bool:
        """Return whether the cache holds the stored version of the object, and not an older one."""
        return keys.spec_key(*key) not in self.caches.specs.undecodable

    def is_newer(self, key: ObjectKey) -> bool:
        """Return whether a newer release of the reconciler wrote the object's status."""
        return keys.status_key(*key) in self.caches.statuses.newer

    def changed_since(self, place: int | None) -> tuple[set[str] | None, int]:
        """Return the keys of specs, statuses, leases and rank reports that changed; None if any may have.

        `place` is the second value that this method returned last; None at the first call.
        """
        return self.caches.changed.since(place)

    # Deployments

    def deployments(self) -> list[ModelDeployment]:
        """Return all deployments by name, with the commits of their hub models."""
        return [self._pinned(deployment) for deployment in self.declared_deployments()]

    def deployment(self, name: str) -> ModelDeployment | None:
        """Return a deployment with the commit of its hub model."""
        model_deployment = self.declared(name)
        return None if model_deployment is None else self._pinned(model_deployment)

    def declared_deployments(self) -> list[ModelDeployment]:
        """Return all deployments by name, as users wrote them."""
        return list(self._all(ModelDeployment))

    def deployments_above(self, priority: int) -> list[ModelDeployment]:
        """Return the deployments of a higher priority, by name."""
        specs = self.caches.specs
        higher = [value for value in specs.values(BY_PRIORITY) if int(value) > priority]
        found = (
            api_object
            for value in higher
            for api_object in specs.by_index(BY_PRIORITY, value).values()
        )
        return sorted(self._pinned_all(found), key=lambda one: one.name)

    def repelling_deployments(self) -> list[ModelDeployment]:
        """Return the deployments with spec.placement.antiAffinity, by name."""
        view = self.caches.specs.by_index(BY_RULE, ANTI_AFFINITY).values()
        return list(self._pinned_all(view))

    def _pinned_all(self, found: Iterable[ApiObject]) -> Iterator[ModelDeployment]:
        return (
            self._pinned(api_object)
            for api_object in found
            if isinstance(api_object, ModelDeployment)
        )

    def declared(self, name: str) -> ModelDeployment | None:
        """Return a deployment as users wrote it."""
        api_object = self.spec(ObjectKey("ModelDeployment", name))
        return api_object if isinstance(api_object, ModelDeployment) else None

    def snapshot(self, deployment: str) -> ModelSnapshot | None:
        return self.caches.snapshots.items.get(keys.named(keys.SNAPSHOT_PREFIX, deployment))

    def preloads_of(self, deployment: str) -> list[PreloadAssignment]:
        """Return the preloads of a deployment, by node."""
        preload_assignments = self.caches.preloads.by_index(BY_DEPLOYMENT, deployment).values()
        return sorted(preload_assignments, key=lambda assignment: assignment.node)

    def preloads_on(self, node: str) -> list[PreloadAssignment]:
        """Return the preloads of a node."""
        return list(self.caches.preloads.by_index(BY_NODE, node).values())

    def has_files(self, node: str, folder: str) -> bool:
        """Return whether a node reports a hub's model as whole."""
        status = self.node_status(node)
        reports = () if status is None else status.models
        return any(
            report.path == folder and report.geometry is not None and not report.missing_bytes
            for report in reports
        )

    def preload_version(self, node: str, deployment: str) -> int:
        """Return the mod_revision of a preload; 0 if there is none."""
        return self.caches.preloads.version(keys.preload_key(node, deployment))

    def is_resolved(self, declared: ModelDeployment) -> bool:
        """Return whether the commit of the deployment's hub model is known; True for models in folders."""
        snapshot = self.snapshot(declared.name)
        is_known = snapshot is not None and snapshot.resolves(declared)
        return declared.spec.model.hub is None or is_known

    def _pinned(self, found: ModelDeployment) -> ModelDeployment:
        """Return the deployment with the commit of its hub model.

        Until a new reference is resolved, this is the version before: it stays in service while the hub is away.
        """
        if found.spec.model.hub is None:
            return found
        snapshot = self.snapshot(found.name)
        if snapshot is not None and snapshot.resolves(found):
            return pinned(found, snapshot)
        return last_version(found, self.revisions_of(found.name))

    def deployment_status(self, name: str) -> ModelDeploymentStatus | None:
        status = self.status(ObjectKey("ModelDeployment", name))
        return status if isinstance(status, ModelDeploymentStatus) else None

    def desired_replicas(self, deployment: ModelDeployment) -> int:
        """Return how many replicas there should be, by the spec or by the autoscaler's last decision."""
        bounds = deployment.spec.autoscaling
        if bounds is None:
            return deployment.spec.replicas
        status = self.deployment_status(deployment.name)
        if status is not None and status.template:
            return status.desired_replicas
        return min(max(deployment.spec.replicas, bounds.min_replicas), bounds.max_replicas)

    def unplaced_deployments(self) -> set[str]:
        """Return the deployments that have fewer replicas than they should.

        Counts specs only: a status lags behind, and a change in the gap would be missed.
        """
        count = self.caches.specs.count
        return {
            deployment.name
            for deployment in self.deployments()
            if count(BY_DEPLOYMENT, deployment.name) < self.desired_replicas(deployment)
        }

    def preloading_deployments(self) -> set[str]:
        """Return the deployments whose preload depends on the state of all nodes."""
        return {
            deployment.name
            for deployment in self.declared_deployments()
            if deployment.spec.preload is not None
        }

    def policies(self) -> list[ModelPolicy]:
        """Return the policies for models on demand, by name."""
        return list(self._all(ModelPolicy))

    def scraped_deployments(self) -> set[str]:
        """Return the deployments whose demand is needed: those with an autoscaler or a running canary.

        If Macs may sleep, all of them.
        """
        may_sleep = any(
            pool.spec.power is not None and pool.spec.power.mode != "AlwaysOn"
            for pool in self.pools()
        )
        return {
            deployment.name
            for deployment in self.deployments()
            if may_sleep
            or deployment.spec.autoscaling is not None
            or self._has_running_canary(deployment)
        }

    def _has_running_canary(self, deployment: ModelDeployment) -> bool:
        if deployment.spec.rollout.canary is None:
            return False
        status = self.deployment_status(deployment.name)
        return (
            status is not None and status.canary is not None and status.canary.outcome == "Running"
        )

    def revisions_of(self, deployment: str) -> list[Revision]:
        """Return the revisions of all deployments that ever had the name."""
        view = self.caches.specs.by_index(REVISIONS, deployment).values()
        return [api_object for api_object in view if isinstance(api_object, Revision)]

    # Replicas

    def replicas(self) -> Iterator[Replica]:
        return self._all(Replica)

    def versioned_replicas(self) -> Iterator[tuple[Replica, int]]:
        """Yield all replicas with the mod_revisions of their specs."""
        specs = self.caches.specs
        for key, api_object in specs.by_index(BY_KIND, "Replica").items():
            if isinstance(api_object, Replica):
                yield api_object, specs.version(key)

    def replicas_of(self, deployment: str) -> list[Replica]:
        """Return the replicas of all deployments that ever had the name."""
        view = self.caches.specs.by_index(BY_DEPLOYMENT, deployment).values()
        return [replica for replica in view if isinstance(replica, Replica)]

    def replicas_on(self, node: str) -> list[Replica]:
        """Return the replicas with a rank on the node, by name."""
        view = self.caches.specs.by_index(BY_NODE, node).values()
        return [replica for replica in view if isinstance(replica, Replica)]

    def replicas_on_group(self, group: str) -> list[Replica]:
        """Return the replicas whose ranks form the group, by name."""
        return [
            replica
            for replica in self.replicas()
            if replica.spec.formation is not None and replica.spec.formation.group == group
        ]

    def report(self, replica: Replica, node: str, rank: int) -> RankStatus | None:
        """Return the node's report on a rank of this replica, of its current or an earlier epoch."""
        item = self.caches.ranks.items.get(keys.rank_key(node, replica.name, rank))
        return item if item and item.replica_uid == replica.metadata.uid else None

    def ranks(self, replica: Replica) -> tuple[RankStatus | None, ...]:
        """Return the report on each rank in the current epoch; None for a rank without one."""
        epoch, meta, reports = _epoch_number(replica), replica.metadata, self.caches.ranks.items
        # Not by `report`: this runs for every replica of the fleet when a leader starts.
        found = [
            reports.get(keys.rank_key(rank.node, meta.name, number))
            for number, rank in enumerate(replica.spec.ranks)
        ]
        return tuple(
            [
                status
                if status and status.replica_uid == meta.uid and status.epoch == epoch
                else None
                for status in found
            ]
        )

    def peaks(self, replica: Replica) -> tuple[int, ...]:
        """Return the peak memory of each rank in its current epoch, in bytes; 0 if unknown."""
        # A rank of another epoch may have had another share of the model.
        if len(replica.spec.ranks) > 1 or replica.spec.formation is not None:
            return tuple([0 if rank is None else rank.peak_bytes for rank in self.ranks(replica)])
        # Without a list of ranks: this runs for every replica of the fleet when a leader starts.
        meta = replica.metadata
        key = keys.rank_key(replica.spec.ranks[0].node, meta.name, 0)
        item = self.caches.ranks.items.get(key)
        is_of_it = item is not None and item.replica_uid == meta.uid and item.epoch == 0
        return (item.peak_bytes,) if item is not None and is_of_it else _NO_PEAK

    def is_serving(self, replica: Replica) -> bool:
        """Return whether the replica has an endpoint; with several ranks, one of its current epoch."""
        key = keys.endpoint_key(replica.spec.ranks[0].node, replica.name)
        endpoint = self.caches.endpoints.items.get(key)
        if endpoint is None or endpoint.spec.replica_uid != replica.metadata.uid:
            return False
        return replica.spec.formation is None or self.ranks(replica)[0] is not None

    def start_seconds(self, replica: Replica) -> float:
        """Return the seconds in which the engine of a replica that serves has started; 0 if that is not known."""
        key = keys.endpoint_key(replica.spec.ranks[0].node, replica.name)
        endpoint = self.caches.endpoints.items.get(key)
        if endpoint is None or endpoint.spec.replica_uid != replica.metadata.uid:
            return 0.0
        return endpoint.spec.start_seconds

    # Nodes

    def node_status(self, name: str) -> NodeStatus | None:
        status = self.status(ObjectKey("Node", name))
        return status if isinstance(status, NodeStatus) else None

    def node_names(self) -> list[str]:
        """Return every node whose agent ever reported."""
        prefix = keys.status_prefix("Node")
        return [key.removeprefix(prefix) for key in self.caches.statuses.by_index(BY_KIND, "Node")]

    def expected_nodes(self) -> set[str]:
        """Return the nodes that should have a lease: known nodes, and nodes with replicas.

        A node that was deleted while it had replicas is only in the second set.
        """
        return {*self.node_names(), *self.caches.specs.values(BY_NODE)}

    def ready_nodes(self) -> set[str]:
        """Return the nodes that hold a lease."""
        return {key.removeprefix(keys.NODE_LEASE_PREFIX) for key in self.caches.leases.items}

    def is_ready(self, node: str) -> bool:
        """Return whether the node holds a lease."""
        return keys.node_lease_key(node) in self.caches.leases.items

    def announced_asleep(self) -> set[str]:
        """Return the nodes whose status says that they sleep; one with a lease has just woken."""
        prefix = keys.status_prefix("Node")
        return {key.removeprefix(prefix) for key in self.caches.statuses.by_index(ASLEEP, ASLEEP)}

    def node_versions(self, name: str) -> tuple[int, int]:
        """Return the mod_revisions of the node's status and of its lease in the caches; 0 for one that is missing."""
        described = self.caches.statuses.version(keys.status_key("Node", name))
        return described, self.caches.leases.version(keys.node_lease_key(name))

    def node(self, name: str) -> Node:
        """Return the node with its status; with an empty spec if it has none yet."""
        api_object = self.spec(ObjectKey("Node", name))
        node = (
            api_object
            if isinstance(api_object, Node)
            else Node.model_validate({"metadata": {"name": name}})
        )
        return node.model_copy(update={"status": self.node_status(name)})

    def same_hardware(self, status: NodeStatus) -> set[str]:
        """Return the nodes that claim the same machine; parts of one machine do not exclude each other."""
        if not status.hardware_uuid:
            return set()
        prefix, by_index = keys.status_prefix("Node"), self.caches.statuses.by_index
        found = set(by_index(BY_HARDWARE, status.hardware_uuid))
        if not status.is_part:
            found |= set(by_index(BY_HARDWARE, f"{PART_OF}{status.hardware_uuid}"))
        return {key.removeprefix(prefix) for key in found}

    def node_life(self, node: str) -> tuple[NodeLifeStatus | None, int]:
        """Return the reconciler's document about the node and its mod_revision; 0 if there is none."""
        key = keys.node_life_key(node)
        return self.caches.lives.items.get(key), self.caches.lives.version(key)

    def is_node_life_newer(self, node: str) -> bool:
        """Return whether a newer release of the reconciler wrote the document about the node."""
        return keys.node_life_key(node) in self.caches.lives.newer

    def described_nodes(self) -> set[str]:
        """Return the nodes that have a document of the reconciler."""
        return {key.removeprefix(keys.NODE_LIFE_PREFIX) for key in self.caches.lives.items}

    # Pools and ShardGroups

    def pools(self) -> tuple[NodePool, ...]:
        """Return all pools by name."""
        return tuple(self._all(NodePool))

    def pool_members(self, pool: NodePool) -> list[str]:
        """Return the nodes that belong to the pool."""
        return [name for name in self.node_names() if in_pool(pool, self.node(name))]

    def groups(self) -> list[ShardGroup]:
        """Return all groups by name."""
        return list(self._all(ShardGroup))

    def group_members(self, group: ShardGroup) -> list[str]:
        """Return the nodes of a group: in the order of its list, or by name if it has a selector."""
        if group.spec.members:
            return [member.node for member in group.spec.members]
        return [name for name in self.node_names() if _is_selected(group, self.node(name))]

    def group_view(self, group: ShardGroup) -> GroupView:
        """Return a group as the planner sees it."""
        members = self.group_members(group)
        machines = ((name, self.node_status(name)) for name in members)
        return GroupView(
            name=group.name,
            spec=group.spec,
            members=tuple(members),
            machines={name: status for name, status in machines if status is not None},
        )

    def group_views(self, shardings: Iterable[str]) -> tuple[GroupView, ...]:
        """Return the groups that values of spec.sharding name, by name; all groups if one of them is Auto."""
        named = set(shardings)
        if "Auto" in named:
            return tuple(map(self.group_view, self.groups()))
        found = (self.spec(ObjectKey("ShardGroup", name)) for name in sorted(named - {"Never"}))
        return tuple(
            self.group_view(api_object)
            for api_object in found
            if isinstance(api_object, ShardGroup)
        )

    def reservations(self) -> "GroupReservations":
        """Return which nodes are reserved by groups with reservation: Exclusive."""
        exclusive = [group for group in self.groups() if group.spec.reservation == "Exclusive"]
        return GroupReservations(
            listed={
                member.node: shard_group.name
                for shard_group in exclusive
                for member in shard_group.spec.members
            },
            selecting=tuple(
                shard_group for shard_group in exclusive if shard_group.spec.selector is not None
            ),
        )


@dataclass(frozen=True, slots=True)
class GroupReservations:
    """The nodes that groups reserve for themselves."""

    listed: dict[str, str]
    """Group by node, for groups that list their members."""
    selecting: tuple[ShardGroup, ...]
    """Groups that select their members by labels."""

    def group_of(self, lister: Lister, node: str) -> str:
        """Return the group that reserves the node; empty if none does."""
        group = self.listed.get(node, "")
        if group or not self.selecting:
            return group
        there = lister.node(node)
        return next(
            (
                shard_group.name
                for shard_group in self.selecting
                if _is_selected(shard_group, there)
            ),
            "",
        )


def _is_selected(group: ShardGroup, node: Node) -> bool:
    return group.spec.selector is not None and selects(group.spec.selector, node)


def _epoch_number(replica: Replica) -> int:
    return replica.spec.formation.epoch if replica.spec.formation is not None else 0
