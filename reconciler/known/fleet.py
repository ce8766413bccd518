"""Answers questions about the fleet. The caches are read only here; changes nothing."""

from collections.abc import Iterator

from reconciler.known.caches import BY_DEPLOYMENT, BY_KIND, BY_NODE, Caches
from reconciler.known.machines import Machines
from reconciler.known.wishes import Wishes
from schemas.meta import ApiObject, ObjectKey, Status
from schemas.node import Node, NodeStatus
from schemas.replica import RankStatus, Replica
from store import keys


class Fleet:
    """Answers questions about the fleet from the caches; changes nothing."""

    def __init__(self, caches: Caches) -> None:
        self._caches = caches
        self.machines = Machines(caches)
        self.wishes = Wishes(caches)

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
