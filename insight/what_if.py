"""Suppositions: manifests that would be applied, Macs that would be lost or join, and the planner's forecast on a copy.

Nothing is written. A lost Mac is gone for good: its replicas are placed anew, or reported with the reason why not.
"""

from dataclasses import dataclass
from typing import Final

from insight.fleet_caches import FleetCaches, copy_caches
from insight.mac_blocks import MacBlock
from insight.memory_outlook import MemoryOutlook, look_at_memory
from insight.placement import snapshot_of
from insight.plan import block_tree, forecast_replicas, planned_blocks, step_tree
from insight.simulated_macs import FleetNode, node_status
from machinery.clock import Clock
from manifests.suggestions import not_found_message
from manifests.trees import Tree
from reconciler.forecast import ForecastStep
from reconciler.listers.caches import BY_KIND, BY_NODE
from reconciler.placement.refusals import Unschedulable
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The fate of every replica that does not stay as it is."""

    steps: tuple[ForecastStep, ...]
    macs: tuple[MacBlock, ...]
    """The Macs that change."""
    memory: MemoryOutlook
    """All Macs, with the memory proofs of their replicas."""

    @property
    def unplaced(self) -> int:
        """The number of replicas that fit nowhere."""
        return sum(isinstance(one.outcome, Unschedulable) for one in self.steps)


def suppose(caches: FleetCaches, clock: Clock, supposition: Supposition) -> FleetCaches:
    """Return a copy of the caches with the changes.

    Raises:
        SuppositionError: a Mac does not exist, or there are too many.

    """
    if sum(one.count for one in supposition.added) > MOST_MACS:
        raise SuppositionError(f"no more than {MOST_MACS} Macs can be added")
    found = copy_caches(caches, clock)
    for name in supposition.lost:
        _lose(found, name)
    reports = _reports(caches)
    for node in supposition.added:
        for name in node.names():
            status = node_status(node, name).model_copy(update=reports)
            _add(found, name, status, NodeSpec(taints=node.taints), clock)
    for obj in supposition.objects:
        version = int(obj.metadata.resource_version or 0)
        put = codec.put_spec(obj)
        found.objects.specs.suppose(KeyValue(put.key, put.value, version, version))
    return found


def _lose(caches: FleetCaches, name: str) -> None:
    objects = caches.objects
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


def _reports(caches: FleetCaches) -> dict[str, object]:
    """Return the models that Macs have: a new one is expected to have the same files."""
    nodes = [one for one in caches.objects.statuses.items.values() if isinstance(one, NodeStatus)]
    return {
        "models": tuple({one.path: one for node in nodes for one in node.models}.values()),
        "adapters": tuple({one.path: one for node in nodes for one in node.adapters}.values()),
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


def forecast_of(supposed: FleetCaches, clock: Clock) -> Forecast:
    """Return the fate of the replicas of a supposed fleet."""
    seen = snapshot_of(supposed, clock.now())
    steps, nodes = forecast_replicas(seen)
    blocks = [one for one in planned_blocks(steps, nodes) if one.has_changed]
    memory = look_at_memory(seen, steps, nodes)
    return Forecast(steps=steps, macs=tuple(blocks), memory=memory)


def forecast_tree(found: Forecast) -> dict[str, Tree]:
    """Return a forecast as a tree; sizes are in bytes."""
    return {
        "sentence": found.memory.sentence,
        "unplaced": found.unplaced,
        "steps": [step_tree(one) for one in found.steps],
        "macs": [block_tree(one) for one in found.macs],
        "memory": found.memory.trees,
    }
