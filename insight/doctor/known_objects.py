"""The objects of a fleet as the caches have them, for the checks of the doctor. Pure."""

from insight.doctor.checks import CONDITION_KINDS, FleetObservation
from insight.doctor.group_admission import check_admission
from insight.fleet_caches import FleetCaches
from reconciler.listers.lister import Lister
from schemas.meta import ObjectKey
from schemas.shardgroup import ShardGroup


def known_objects(caches: FleetCaches) -> FleetObservation:
    """Return the objects of the caches, each with its status."""
    lister = Lister(caches.objects)
    nodes = []
    for name in lister.node_names():
        # With the conditions of its agent and of the reconciler, as the store shows it.
        node, (life, _) = lister.node(name), lister.node_life(name)
        if node.status is not None and life is not None:
            conditions = (*node.status.conditions, *life.conditions)
            status = node.status.model_copy(update={"conditions": conditions})
            node = node.model_copy(update={"status": status})
        nodes.append(node)
    ready = frozenset(lister.ready_nodes())
    objects = [
        obj.model_copy(update={"status": lister.status(ObjectKey(obj.kind, obj.name))})
        for kind in CONDITION_KINDS
        for obj in sorted(lister.of_kind(kind), key=lambda obj: obj.name)
    ]
    groups = [api_object for api_object in objects if isinstance(api_object, ShardGroup)]
    return FleetObservation(
        nodes=nodes,
        ready=ready,
        replicas=list(lister.replicas()),
        objects=objects,
        admissions=[check_admission(group, nodes, ready) for group in groups],
        leader=next(iter(caches.leader.items), ""),
    )
