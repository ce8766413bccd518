"""From the caches to what the planner sees. The caches are read only here."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from reconciler.observe import NodeView, Observed, ReplicaView
from schemas import kinds, quantity
from schemas.deployment import ModelDeployment
from schemas.meta import ApiObject, Condition, ObjectKey, Status, Truth, find_condition
from schemas.node import Node, NodeLease, NodeStatus, effective_labels, matches
from schemas.pools import NodePool, NodeSelector, ShardGroup
from schemas.replica import Endpoint, RankStatus, Replica
from store import codec, keys
from store.informer import Cache, Informer
from store.port import KeyValue


@dataclass(frozen=True, slots=True, kw_only=True)
class Caches:
    """What the reconciler knows of the store."""

    specs: Informer[ApiObject]
    statuses: Informer[Status]
    ranks: Informer[RankStatus]
    leases: Informer[NodeLease]
    endpoints: Informer[Endpoint]

    def all(self) -> tuple[Cache, ...]:
        return (self.specs, self.statuses, self.ranks, self.leases, self.endpoints)


def decode_spec(item: KeyValue) -> ApiObject:
    """Return the object under a spec key, whatever its kind."""
    return codec.decode_object(_kind_of(item).type, item)


def decode_status(item: KeyValue) -> Status:
    """Return the document under a status key, whatever its kind."""
    model = codec.status_type(_kind_of(item).type)
    if model is None:
        raise codec.UndecodableError(f"{item.key}: objects of this kind have no status")
    return codec.decode(model, item)


def _kind_of(item: KeyValue) -> kinds.Kind:
    key = object_key(item.key)
    kind = None if key is None else kinds.by_name(key.kind)
    if kind is None:
        raise codec.UndecodableError(f"{item.key}: no key of an object of a known kind")
    return kind


def object_key(key: str) -> ObjectKey | None:
    """Return which object a key is about; None for what somebody else put below our prefix."""
    try:
        return ObjectKey(*keys.kind_and_name(key))
    except ValueError:
        return None


class Fleet:
    """Answers questions about the fleet from the caches; changes nothing."""

    def __init__(self, caches: Caches) -> None:
        self._caches = caches

    def spec(self, key: ObjectKey) -> ApiObject | None:
        return self._caches.specs.items.get(keys.spec_key(*key))

    def status(self, key: ObjectKey) -> Status | None:
        return self._caches.statuses.items.get(keys.status_key(*key))

    def of_kind(self, kind: str) -> Iterator[ApiObject]:
        prefix = keys.spec_prefix(kind)
        specs = self._caches.specs.items
        return (specs[key] for key in sorted(specs) if key.startswith(prefix))

    def unplaced(self) -> set[str]:
        """Return the deployments that want more replicas than they have.

        Counted from specs alone: statuses lag behind, and a wake-up could fall into the gap.
        """
        counts = Counter(replica.spec.deployment for replica in self.replicas())
        return {
            found.name
            for found in self.of_kind("ModelDeployment")
            if isinstance(found, ModelDeployment) and counts[found.name] < found.spec.replicas
        }

    def replicas(self) -> Iterator[Replica]:
        return (found for found in self.of_kind("Replica") if isinstance(found, Replica))

    def is_readable(self, key: ObjectKey) -> bool:
        """Return whether the object in the store is the one in the cache."""
        return keys.spec_key(*key) not in self._caches.specs.undecodable

    def node_status(self, name: str) -> NodeStatus | None:
        found = self.status(ObjectKey("Node", name))
        return found if isinstance(found, NodeStatus) else None

    def node_names(self) -> list[str]:
        """Return every node whose agent ever reported."""
        prefix = keys.status_prefix("Node")
        found = (key for key in self._caches.statuses.items if key.startswith(prefix))
        return sorted(key.removeprefix(prefix) for key in found)

    def expected_nodes(self) -> set[str]:
        """Return the nodes that ought to be there: known ones, and those with work to do.

        A node that was deleted while replicas were assigned to it is the latter alone.
        """
        assigned = {rank.node for replica in self.replicas() for rank in replica.spec.ranks}
        return {*self.node_names(), *assigned}

    def ready_nodes(self) -> set[str]:
        """Return the nodes whose agents renew their leases."""
        return {key.removeprefix(keys.NODE_LEASE_PREFIX) for key in self._caches.leases.items}

    def nodes(self) -> tuple[NodeView, ...]:
        """Return every node as placement sees it."""
        ready = self.ready_nodes()
        used, counts = self._assigned()
        groups = self._exclusive_groups()
        views = []
        for name in self.node_names():
            view = self._node(name, is_ready=name in ready)
            views.append(
                replace(
                    view,
                    used_bytes=used[name],
                    replicas=counts.get(name, {}),
                    reserved_by_group=groups.get(name, ""),
                )
            )
        return tuple(views)

    def _node(self, name: str, *, is_ready: bool) -> NodeView:
        status = self.node_status(name)
        assert status is not None
        node = self.node(name)
        pools = [pool for pool in self._pools() if in_pool(pool, node)]
        reserved = [quantity.parse(p.spec.reserved.memory) for p in pools if p.spec.reserved]
        return NodeView(
            name=name,
            is_ready=is_ready,
            is_cordoned=node.spec.unschedulable,
            allocatable_bytes=status.allocatable_bytes - max(reserved, default=0),
            labels=effective_labels(node),
            pools=frozenset(pool.name for pool in pools),
            models={report.path: report for report in status.models},
        )

    def node(self, name: str) -> Node:
        """Return the node with its status, whether or not anybody wrote a spec for it."""
        found = self.spec(ObjectKey("Node", name))
        node = (
            found if isinstance(found, Node) else Node.model_validate({"metadata": {"name": name}})
        )
        return node.model_copy(update={"status": self.node_status(name)})

    def _pools(self) -> list[NodePool]:
        return [found for found in self.of_kind("NodePool") if isinstance(found, NodePool)]

    def pool_members(self, pool: NodePool) -> list[str]:
        return [name for name in self.node_names() if in_pool(pool, self.node(name))]

    def _assigned(self) -> tuple[Counter[str], dict[str, dict[str, int]]]:
        used: Counter[str] = Counter()
        counts: dict[str, dict[str, int]] = {}
        for found in self.replicas():
            for rank in found.spec.ranks:
                used[rank.node] += rank.memory.total_bytes
                of_node = counts.setdefault(rank.node, {})
                of_node[found.spec.deployment] = of_node.get(found.spec.deployment, 0) + 1
        return used, counts

    def _exclusive_groups(self) -> dict[str, str]:
        return {
            member.node: group.name
            for group in self.of_kind("ShardGroup")
            if isinstance(group, ShardGroup) and group.spec.reservation == "Exclusive"
            for member in group.spec.members
        }

    def observe(self, name: str, *, lost: frozenset[str], next_look_s: float | None) -> Observed:
        """Return everything that decides about one deployment.

        `lost` are the nodes whose grace period is over.
        """
        found = self.spec(ObjectKey("ModelDeployment", name))
        deployment = found if isinstance(found, ModelDeployment) else None
        mine = [r for r in self.replicas() if r.spec.deployment == name]
        return Observed(
            name=name,
            deployment=deployment,
            replicas=tuple(self._replica(r, deployment, lost) for r in mine),
            nodes=self.nodes(),
            next_look_s=next_look_s,
        )

    def _replica(
        self, replica: Replica, deployment: ModelDeployment | None, lost: frozenset[str]
    ) -> ReplicaView:
        rank = self.rank(replica)
        conditions = rank.conditions if rank is not None else ()
        ready = find_condition(conditions, "Ready")
        owners = {owner.uid for owner in replica.metadata.owner_references}
        return ReplicaView(
            replica=replica,
            version=self._caches.specs.version(keys.spec_key("Replica", replica.name)),
            is_ours=deployment is not None and deployment.metadata.uid in owners,
            is_ready=self.is_serving(replica),
            is_stopped=_has(conditions, "Stopped"),
            is_node_lost=replica.spec.ranks[0].node in lost,
            trouble="" if ready is None or ready.status is Truth.TRUE else ready.message,
        )

    def rank(self, replica: Replica) -> RankStatus | None:
        """Return what the agent says of the replica's rank 0, if it speaks of this very replica."""
        found = self._caches.ranks.items.get(keys.rank_key(replica.name, 0))
        return found if found and found.replica_uid == replica.metadata.uid else None

    def is_serving(self, replica: Replica) -> bool:
        endpoint = self._caches.endpoints.items.get(keys.endpoint_key(replica.name))
        return endpoint is not None and endpoint.spec.replica_uid == replica.metadata.uid


def in_pool(pool: NodePool, node: Node) -> bool:
    """Return whether the node belongs to the pool, by name or by its properties."""
    by_name = node.metadata.name in pool.spec.nodes
    return by_name or (pool.spec.selector is not None and _selected(pool.spec.selector, node))


def _selected(selector: NodeSelector, node: Node) -> bool:
    if node.status is None or not matches(effective_labels(node), selector.match_labels):
        return False
    if selector.chips and node.status.chip not in selector.chips:
        return False
    least = quantity.parse(selector.min_memory) if selector.min_memory else 0
    return node.status.memory_bytes >= least


def _has(conditions: tuple[Condition, ...], type_: str) -> bool:
    found = find_condition(conditions, type_)
    return found is not None and found.status is Truth.TRUE
