"""Deployments that wait at zero, and idle replicas that may give way, from caches and the leader's memory."""

from collections.abc import Callable, Iterable
from datetime import datetime
from math import inf

from reconciler.deployments.autoscaling.autoscaler import Autoscaler
from reconciler.deployments.demand.gateway_metrics import Demand
from reconciler.listers.lister import Lister
from reconciler.placement.load_times import LoadTimes, load_s
from reconciler.placement.swap import IdleReplica, next_use_s, residence_s
from reconciler.placement.table import NodeTable
from schemas.meta import ENDED_BECAUSE, ConditionStatus, ObjectKey, Status, find_condition
from schemas.modelpolicy import ON_DEMAND_LABEL
from schemas.replica import Replica, ReplicaStatus


def waiting_at_zero(lister: Lister, autoscaler: Autoscaler) -> tuple[str, ...]:
    """Return the deployments for which requests wait and that have no replica, the longest wait first."""
    return tuple(
        name
        for name in autoscaler.awaited()
        if all(r.metadata.deletion_timestamp is not None for r in lister.replicas_of(name))
    )


def find_idle_replicas(
    lister: Lister,
    autoscaler: Autoscaler,
    demand: Callable[[str], Demand | None],
    table: NodeTable,
    now: tuple[datetime, float],
    load_times: LoadTimes,
) -> dict[str, IdleReplica]:
    """Return the replicas of deployments that may swap and have no request; `now` is also monotonic."""
    return {
        replica.name: IdleReplica(
            load_s=seconds,
            next_use_s=inf if load.released else next_use_s(*autoscaler.use(name, now[1])),
            stays_s=0.0
            if load.released
            else residence_s(seconds) - (now[0] - since).total_seconds(),
            is_on_demand=ON_DEMAND_LABEL in replica.metadata.labels,
        )
        for name in autoscaler.swappable()
        if (load := demand(name)) is not None and load.is_complete and not load.requests
        for replica in lister.replicas_of(name)
        if (since := occupies_since(replica, lister.status(ObjectKey("Replica", replica.name))))
        is not None
        for seconds in (_load_s(replica, table, load_times),)
    }


def has_given_way(replicas: Iterable[Replica]) -> bool:
    """Return whether one of the replicas ends because it gave way to a model at zero."""
    notes = (replica.metadata.annotations.get(ENDED_BECAUSE, "") for replica in replicas)
    return any(note.startswith("GaveWay:") for note in notes)


def occupies_since(replica: Replica, status: Status | None) -> datetime | None:
    """Return since when a replica serves, or holds its memory in vain because its engine does not get ready. Pure.

    None while it ends, and while it fetches its model.
    """
    is_fetching = isinstance(status, ReplicaStatus) and bool(status.fetches)
    if replica.metadata.deletion_timestamp is not None or is_fetching:
        return None
    ready = None if status is None else find_condition(status.conditions, "Ready")
    if ready is not None and ready.status is ConditionStatus.TRUE:
        return ready.last_transition_time
    return replica.metadata.creation_timestamp


def _load_s(replica: Replica, table: NodeTable, load_times: LoadTimes) -> float:
    """Return the seconds in which its slowest rank would load again."""
    last_s = load_times.of(replica.spec.model.folder)
    disks = {
        node.name: node.disk_gbps for node in table.named(rank.node for rank in replica.spec.ranks)
    }
    return max(
        load_s(rank.memory.weights_bytes, disks.get(rank.node, 0.0), last_s.get(rank.node, 0.0))
        for rank in replica.spec.ranks
    )
