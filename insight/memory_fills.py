"""The parts of a Mac's memory that replicas hold, as pictures of a fleet draw them. Pure."""

from collections.abc import Iterable

from insight.conditions import Row
from insight.fleet_caches import FleetCaches
from schemas.meta import is_true
from schemas.replica import Replica, ReplicaStatus
from store import keys


def fills_of(caches: FleetCaches, node: str, replicas: Iterable[Replica]) -> list[Row]:
    """Return what each replica holds of a Mac's memory by its proof, and how far its model is downloaded."""
    fills: list[Row] = []
    for replica in sorted(replicas, key=lambda one: one.name):
        item = caches.objects.statuses.items.get(keys.status_key("Replica", replica.name))
        status = item if isinstance(item, ReplicaStatus) else ReplicaStatus()
        head = {"replica": replica.name, "model": replica.spec.deployment}
        percents = (fetch.percent for fetch in status.fetches if fetch.node == node)
        state = {"isReady": is_true(status.conditions, "Ready"), "percent": next(percents, None)}
        for rank in replica.spec.ranks:
            if rank.node == node:
                sizes = (rank.memory.total_bytes, rank.memory.weights_bytes)
                kv_bytes = rank.memory.kv_cache_bytes
                fills.append({**head, **_sizes(*sizes, kv_bytes), **state, "isLeaving": False})
        for leaving in replica.spec.leaving:
            if leaving.node == node:
                state = {"isReady": False, "percent": None, "isLeaving": True}
                fills.append({**head, **_sizes(leaving.memory_bytes, 0, 0), **state})
    return fills


def _sizes(total: int, weights: int, kv: int) -> Row:
    return {"bytes": total, "weightsBytes": weights, "kvBytes": kv}
