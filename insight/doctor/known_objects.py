"""The objects of a fleet as the caches have them, for the checks of the doctor. Pure."""

from insight.doctor.checks import CONDITION_KINDS, FleetObjects
from insight.doctor.group_admission import check_admission
from insight.fleet_caches import FleetCaches
from reconciler.listers.lister import Lister
from schemas.meta import ApiObject, ObjectKey
from schemas.node import Node
from schemas.shardgroup import ShardGroup


def known_objects(caches: FleetCaches) -> FleetObjects:
    """Return the objects of the caches, each with its status."""
    lister = Lister(caches.objects)
    nodes = [_node(lister, name) for name in lister.node_names()]
    ready = frozenset(lister.ready_nodes())
    found = [
        _with_status(lister, one)
        for kind in CONDITION_KINDS
        for one in sorted(lister.of_kind(kind), key=lambda one: one.name)
    ]
    groups = [one for one in found if isinstance(one, ShardGroup)]
    return FleetObjects(
        nodes=nodes,
        ready=ready,
        replicas=list(lister.replicas()),
        objects=found,
        admissions=[check_admission(group, nodes, ready) for group in groups],
        has_leader=bool(caches.leader.items),
    )


def _with_status(lister: Lister, found: ApiObject) -> ApiObject:
    status = lister.status(ObjectKey(found.kind, found.name))
    return found.model_copy(update={"status": status})


def _node(lister: Lister, name: str) -> Node:
    """Return a node with the conditions of its agent and of the reconciler, as the store shows it."""
    node, (life, _) = lister.node(name), lister.node_life(name)
    if node.status is None or life is None:
        return node
    conditions = (*node.status.conditions, *life.conditions)
    status = node.status.model_copy(update={"conditions": conditions})
    return node.model_copy(update={"status": status})
