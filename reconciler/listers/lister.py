"""Answers questions about the machines behind the nodes, and what was written about them; changes nothing.

What deployments want, as far as the caches tell: how many replicas, whose demand matters. Changes nothing.

Answers questions about the fleet. The caches are read only here; changes nothing.

Answers questions about ShardGroups: who belongs to them, and what runs there; changes nothing.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from reconciler.groups.group_view import GroupView
from reconciler.listers.caches import (
    BY_DEPLOYMENT,
    BY_HARDWARE,
    BY_KIND,
    BY_NODE,
    PART_OF,
    REVISIONS,
    Caches,
)
from schemas.deployment import ModelDeployment, ModelDeploymentStatus, Revision
from schemas.meta import ApiObject, ObjectKey, Status
from schemas.node import Node, NodeLifeStatus, NodeStatus
from schemas.pools import selects
from schemas.replica import RankStatus, Replica
from schemas.shardgroup import ShardGroup
from store import keys


class MachineLister:
    """The part of `Fleet` that is about which Mac a node is, and how it has been lately."""

    def __init__(self, caches: Caches) -> None:
        self._caches = caches

    def claiming(self, status: NodeStatus) -> set[str]:
        """Return the nodes that cannot be there beside this one: the same machine, and not both parts of it."""
        if not status.hardware_uuid:
            return set()
        prefix, by_index = keys.status_prefix("Node"), self._caches.statuses.by_index
        found = set(by_index(BY_HARDWARE, status.hardware_uuid))
        if not status.is_part:
            found |= set(by_index(BY_HARDWARE, f"{PART_OF}{status.hardware_uuid}"))
        return {key.removeprefix(prefix) for key in found}

    def peaks(self, replica: Replica) -> tuple[int, ...]:
        """Return the most memory in bytes that each rank of this very replica was seen to take; 0 if unknown."""
        items = self._caches.ranks.items
        reports = [
            items.get(keys.rank_key(rank.node, replica.name, number))
            for number, rank in enumerate(replica.spec.ranks)
        ]
        epoch = replica.spec.formation.epoch if replica.spec.formation is not None else 0
        # The rank of another epoch may have had another share of the model.
        mine = (replica.metadata.uid, epoch)
        return tuple(
            one.peak_bytes if one is not None and (one.replica_uid, one.epoch) == mine else 0
            for one in reports
        )

    def life(self, node: str) -> tuple[NodeLifeStatus | None, int]:
        """Return what a reconciler wrote about the node, and the mod_revision of that; 0 if nothing."""
        key = keys.node_life_key(node)
        return self._caches.lives.items.get(key), self._caches.lives.version(key)

    def is_newer(self, node: str) -> bool:
        """Return whether a newer reconciler wrote about it."""
        return keys.node_life_key(node) in self._caches.lives.newer

    def described(self) -> set[str]:
        """Return the nodes that a reconciler ever wrote about."""
        return {key.removeprefix(keys.NODE_LIFE_PREFIX) for key in self._caches.lives.items}


class DeploymentLister:
    """Answers questions about deployments; part of `fleet.Fleet`."""

    def __init__(self, caches: Caches) -> None:
        self._caches = caches

    def unplaced(self) -> set[str]:
        """Return the deployments that want more replicas than they have.

        Counted from specs alone: statuses lag behind, and a wake-up could fall into the gap.
        """
        count = self._caches.specs.count
        return {
            found.name
            for found in self._deployments()
            if count(BY_DEPLOYMENT, found.name) < self.desired(found)
        }

    def desired(self, deployment: ModelDeployment) -> int:
        """Return how many replicas there should be: what the spec says, or what autoscaling made of it."""
        bounds = deployment.spec.autoscaling
        if bounds is None:
            return deployment.spec.replicas
        told = self.status(deployment.name)
        if told is not None and told.template:
            return told.desired_replicas
        return min(max(deployment.spec.replicas, bounds.min_replicas), bounds.max_replicas)

    def status(self, name: str) -> ModelDeploymentStatus | None:
        found = self._caches.statuses.items.get(keys.status_key("ModelDeployment", name))
        return found if isinstance(found, ModelDeploymentStatus) else None

    def watched(self) -> set[str]:
        """Return the deployments whose demand matters: those that scale with it, and those on trial."""
        return {
            found.name
            for found in self._deployments()
            if (found.spec.autoscaling is not None or self._is_on_trial(found))
        }

    def _is_on_trial(self, deployment: ModelDeployment) -> bool:
        if deployment.spec.rollout.canary is None:
            return False
        told = self.status(deployment.name)
        return told is not None and told.canary is not None and told.canary.outcome == "Running"

    def revisions_of(self, deployment: str) -> list[Revision]:
        """Return the revisions that bear the deployment's name, be they of an earlier one."""
        found = self._caches.specs.by_index(REVISIONS, deployment).values()
        return [one for one in found if isinstance(one, Revision)]

    def _deployments(self) -> list[ModelDeployment]:
        found = self._caches.specs.by_index(BY_KIND, "ModelDeployment").values()
        return [one for one in found if isinstance(one, ModelDeployment)]


class Lister:
    """Answers questions about the fleet from the caches; changes nothing."""

    def __init__(self, caches: Caches) -> None:
        self._caches = caches
        self.machines = MachineLister(caches)
        self.wishes = DeploymentLister(caches)

    def spec(self, key: ObjectKey) -> ApiObject | None:
        return self._caches.specs.items.get(keys.spec_key(*key))

    def status(self, key: ObjectKey) -> Status | None:
        return self._caches.statuses.items.get(keys.status_key(*key))

    def of_kind(self, kind: str) -> Iterator[ApiObject]:
        """Return the objects of a kind by name."""
        return iter(self._caches.specs.by_index(BY_KIND, kind).values())

    def replicas(self) -> Iterator[Replica]:
        return (found for found in self.of_kind("Replica") if isinstance(found, Replica))

    def replicas_of(self, deployment: str) -> list[Replica]:
        """Return the replicas that bear the deployment's name, be they of an earlier one."""
        found = self._caches.specs.by_index(BY_DEPLOYMENT, deployment).values()
        return [replica for replica in found if isinstance(replica, Replica)]

    def replicas_on(self, node: str) -> list[Replica]:
        """Return the replicas of which a rank is assigned to the node, by name."""
        found = self._caches.specs.by_index(BY_NODE, node).values()
        return [replica for replica in found if isinstance(replica, Replica)]

    def is_readable(self, key: ObjectKey) -> bool:
        """Return whether the object in the store is the one in the cache."""
        return keys.spec_key(*key) not in self._caches.specs.undecodable

    def is_newer(self, key: ObjectKey) -> bool:
        """Return whether a newer reconciler wrote the object's status."""
        return keys.status_key(*key) in self._caches.statuses.newer

    def node_status(self, name: str) -> NodeStatus | None:
        found = self.status(ObjectKey("Node", name))
        return found if isinstance(found, NodeStatus) else None

    def node_names(self) -> list[str]:
        """Return every node whose agent ever reported."""
        prefix = keys.status_prefix("Node")
        return [key.removeprefix(prefix) for key in self._caches.statuses.by_index(BY_KIND, "Node")]

    def expected_nodes(self) -> set[str]:
        """Return the nodes that ought to be there: known ones, and those with work to do.

        A node that was deleted while replicas were assigned to it is the latter alone.
        """
        return {*self.node_names(), *self._caches.specs.values(BY_NODE)}

    def ready_nodes(self) -> set[str]:
        """Return the nodes whose agents renew their leases."""
        return {key.removeprefix(keys.NODE_LEASE_PREFIX) for key in self._caches.leases.items}

    def is_ready(self, node: str) -> bool:
        """Return whether the node is one of them."""
        return keys.node_lease_key(node) in self._caches.leases.items

    def node(self, name: str) -> Node:
        """Return the node with its status, whether or not anybody wrote a spec for it."""
        found = self.spec(ObjectKey("Node", name))
        node = (
            found if isinstance(found, Node) else Node.model_validate({"metadata": {"name": name}})
        )
        return node.model_copy(update={"status": self.node_status(name)})

    def ranks(self, replica: Replica) -> tuple[RankStatus | None, ...]:
        """Return what agents say of each rank, as far as they speak of this very replica and epoch."""
        epoch = replica.spec.formation.epoch if replica.spec.formation is not None else 0
        reports = (
            self.report(replica, rank.node, number)
            for number, rank in enumerate(replica.spec.ranks)
        )
        return tuple(one if one is not None and one.epoch == epoch else None for one in reports)

    def report(self, replica: Replica, node: str, rank: int) -> RankStatus | None:
        """Return what the agent of a node says of a rank of this very replica, be it of an earlier epoch."""
        found = self._caches.ranks.items.get(keys.rank_key(node, replica.name, rank))
        return found if found and found.replica_uid == replica.metadata.uid else None

    def is_serving(self, replica: Replica) -> bool:
        """Return whether there is an endpoint of the replica; in a group, of its current epoch."""
        key = keys.endpoint_key(replica.spec.ranks[0].node, replica.name)
        endpoint = self._caches.endpoints.items.get(key)
        if endpoint is None or endpoint.spec.replica_uid != replica.metadata.uid:
            return False
        return replica.spec.formation is None or self.ranks(replica)[0] is not None

    def version(self, replica: Replica) -> int:
        """Return the mod_revision of the replica's spec in the cache."""
        return self._caches.specs.version(keys.spec_key("Replica", replica.name))

    def changed_since(self, place: int | None) -> tuple[set[str] | None, int]:
        """Return the keys of specs, statuses, leases and reports that changed; None means any of them.

        `place` is what this returned the last time; None, if it never did.
        """
        return self._caches.changed.since(place)


def all_groups(fleet: Lister) -> list[ShardGroup]:
    """Return all groups by name."""
    return [one for one in fleet.of_kind("ShardGroup") if isinstance(one, ShardGroup)]


def group_view(fleet: Lister, group: ShardGroup) -> GroupView:
    """Return a group as the planner sees it."""
    members = group_members(fleet, group)
    machines = ((name, fleet.node_status(name)) for name in members)
    return GroupView(
        name=group.name,
        spec=group.spec,
        members=tuple(members),
        machines={name: status for name, status in machines if status is not None},
    )


def group_views(fleet: Lister, wishes: Iterable[str]) -> tuple[GroupView, ...]:
    """Return the groups that are wished for, by name; all of them if one of the wishes is Auto."""
    named = set(wishes)
    if "Auto" in named:
        return tuple(group_view(fleet, group) for group in all_groups(fleet))
    found = (fleet.spec(ObjectKey("ShardGroup", name)) for name in sorted(named - {"Never"}))
    return tuple(group_view(fleet, one) for one in found if isinstance(one, ShardGroup))


def group_members(fleet: Lister, group: ShardGroup) -> list[str]:
    """Return the nodes of a group: as they are listed, or those that its selector finds, by name."""
    if group.spec.members:
        return [member.node for member in group.spec.members]
    return [name for name in fleet.node_names() if _is_selected(group, fleet.node(name))]


def replicas_on_group(fleet: Lister, group: str) -> list[Replica]:
    """Return the replicas whose ranks work together on the group, by name."""
    return [
        found
        for found in fleet.replicas()
        if found.spec.formation is not None and found.spec.formation.group == group
    ]


@dataclass(frozen=True, slots=True)
class GroupReservations:
    """Which nodes groups keep for themselves."""

    listed: dict[str, str]
    """Members that groups list, with the group's name."""
    selecting: tuple[ShardGroup, ...]
    """Groups that find theirs by what they are."""

    def group_of(self, fleet: Lister, node: str) -> str:
        """Return the name of the group that keeps the node for itself; empty if none does."""
        found = self.listed.get(node, "")
        if found or not self.selecting:
            return found
        there = fleet.node(node)
        return next((one.name for one in self.selecting if _is_selected(one, there)), "")


def group_reservations(fleet: Lister) -> GroupReservations:
    """Return the reservations as they are now."""
    exclusive = [one for one in all_groups(fleet) if one.spec.reservation == "Exclusive"]
    return GroupReservations(
        listed={member.node: one.name for one in exclusive for member in one.spec.members},
        selecting=tuple(one for one in exclusive if one.spec.selector is not None),
    )


def _is_selected(group: ShardGroup, node: Node) -> bool:
    return group.spec.selector is not None and selects(group.spec.selector, node)
