"""Replicas that may give way, and the time from which each counts."""

from datetime import datetime, timedelta

import pytest

from reconciler.deployments.autoscaling.idle_replicas import occupies_since
from reconciler.placement.load_times import LoadTimes
from schemas.meta import Condition, ConditionStatus
from schemas.replica import FetchStatus, Replica, ReplicaStatus
from tests.support.world import NOW, replica, with_metadata

READY = NOW + timedelta(seconds=20)
FETCH = FetchStatus(node="a", phase="Downloading", present_bytes=1, total_bytes=2)


def of(*, ready: bool, fetches: bool = False) -> ReplicaStatus:
    truth = ConditionStatus.TRUE if ready else ConditionStatus.FALSE
    condition = Condition(type="Ready", status=truth, reason="Fake", last_transition_time=READY)
    return ReplicaStatus(conditions=(condition,), fetches=(FETCH,) if fetches else ())


def made(**metadata: object) -> Replica:
    return with_metadata(replica(0).replica, creation_timestamp=NOW, **metadata)


@pytest.mark.parametrize(
    ("placed", "status", "since"),
    [
        (made(), of(ready=True), READY),
        (made(), of(ready=False), NOW),
        (made(), None, NOW),
        (made(), of(ready=False, fetches=True), None),
        (made(deletion_timestamp=NOW), of(ready=True), None),
    ],
    ids=["serves", "fails-to-start", "new", "fetches", "ends"],
)
def test_a_replica_that_never_gets_ready_does_not_hold_its_memory_for_ever(
    placed: Replica, status: ReplicaStatus | None, since: datetime | None
) -> None:
    assert occupies_since(placed, status) == since


def test_the_last_load_on_each_mac_counts() -> None:
    times, serving = LoadTimes(), replica(0).replica
    times.note(serving, 9.0)
    times.note(serving, 7.0)
    times.note(serving, 0.0)
    assert times.of(serving.spec.model.folder) == {serving.spec.ranks[0].node: 7.0}
    assert times.of("other") == {}
