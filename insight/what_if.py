"""Suppositions: manifests that would be applied, Macs that would be lost or join, on a copy of the caches.

Nothing is written. A lost Mac is gone for good: its replicas are placed anew, or reported with the reason why not.
"""

from dataclasses import dataclass
from typing import Final

from insight.fleet_caches import FleetCaches, copy_caches
from insight.simulated_macs import FleetNode, node_status
from machinery.clock import Clock
from manifests.suggestions import not_found_message
from reconciler.listers.caches import BY_KIND, BY_NODE
from schemas import kinds
from schemas.meta import ApiObject, ObjectMeta
from schemas.node import Node, NodeLease, NodeSpec, NodeStatus
from store import codec, keys
from store.port import KeyValue

MOST_MACS: Final = 1000
"""Macs that may be added."""


class SuppositionError(Exception):
    """A supposition that makes no sense; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Supposition:
    """Changes of a fleet that have not happened."""

    objects: tuple[ApiObject, ...] = ()
    """As they would be in the store after an apply."""
    lost: tuple[str, ...] = ()
    """Names of Macs that are gone."""
    added: tuple[FleetNode, ...] = ()


def suppose(caches: FleetCaches, clock: Clock, supposition: Supposition) -> FleetCaches:
    """Return a copy of the caches with the changes.

    Raises:
        SuppositionError: a Mac does not exist, or there are too many.

    """
    if sum(fleet_node.count for fleet_node in supposition.added) > MOST_MACS:
        raise SuppositionError(f"no more than {MOST_MACS} Macs can be added")
    fleet_caches = copy_caches(caches, clock)
    for name in supposition.lost:
        objects = fleet_caches.objects
        known = {*objects.specs.by_index(BY_KIND, "Node")}
        if keys.spec_key("Node", name) not in known:
            kind = kinds.by_name("Node")
            assert kind is not None
            names = sorted(keys.kind_and_name(key)[1] for key in known)
            raise SuppositionError(not_found_message(kind, name, names))
        for key in objects.specs.by_index(BY_NODE, name):
            objects.specs.forget(key)
            objects.statuses.forget(keys.status_key("Replica", keys.kind_and_name(key)[1]))
        objects.specs.forget(keys.spec_key("Node", name))
        objects.statuses.forget(keys.status_key("Node", name))
        objects.leases.forget(keys.node_lease_key(name))
        objects.lives.forget(keys.node_life_key(name))
    reports = _reports(caches)
    for node in supposition.added:
        for name in node.names():
            status = node_status(node, name).model_copy(update=reports)
            _add(fleet_caches, name, status, NodeSpec(taints=node.taints), clock)
    for obj in supposition.objects:
        version = int(obj.metadata.resource_version or 0)
        put = codec.put_spec(obj)
        fleet_caches.objects.specs.suppose(KeyValue(put.key, put.value, version, version))
    return fleet_caches


def _reports(caches: FleetCaches) -> dict[str, object]:
    """Return the models that Macs have: a new one is expected to have the same files."""
    nodes = [
        item for item in caches.objects.statuses.items.values() if isinstance(item, NodeStatus)
    ]
    return {
        "models": tuple({model.path: model for node in nodes for model in node.models}.values()),
        "adapters": tuple(
            {adapter.path: adapter for node in nodes for adapter in node.adapters}.values()
        ),
    }


def _add(caches: FleetCaches, name: str, status: NodeStatus, spec: NodeSpec, clock: Clock) -> None:
    objects = caches.objects
    if keys.spec_key("Node", name) in objects.specs.items:
        raise SuppositionError(f"there is a Mac {name} already; give the new one another name")
    metadata = ObjectMeta(name=name, uid=status.uid, generation=1, creation_timestamp=clock.now())
    put = codec.put_spec(Node(metadata=metadata, spec=spec))
    objects.specs.suppose(KeyValue(put.key, put.value, 1, 1))
    lease = codec.encode(NodeLease(uid=status.uid, session="supposed"))
    objects.leases.suppose(KeyValue(keys.node_lease_key(name), lease, 1, 1))
    report = codec.encode(status)
    objects.statuses.suppose(KeyValue(keys.status_key("Node", name), report, 1, 1))
