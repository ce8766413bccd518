"""What engines were seen to take against what was proven: what is said, counted and shown."""

import pytest

from reconciler.events import DeploymentEvents
from reconciler.listers.caches import make_caches
from reconciler.listers.lister import Lister
from reconciler.placement import memory_proof
from reconciler.status import replica_status
from schemas.event import Event
from schemas.meta import ConditionStatus, Status, find_condition
from schemas.replica import MemoryProof, RankStatus
from store import objects
from store.events import EventRecorder
from store.memory import MemoryTransport
from tests.support.clock import FakeClock
from tests.support.fleets import GIB, NOW, PROOF, deployment, observed, replica

CENTI = GIB // 100
MINE = replica(0).replica


def rank(peak_bytes: int) -> RankStatus:
    return RankStatus(replica_uid=MINE.metadata.uid, node="a", peak_bytes=peak_bytes)


def of(peak_bytes: int, *, memory: MemoryProof = PROOF, old: Status | None = None) -> Status:
    view = replica(0, memory=memory)
    return replica_status(view, [rank(peak_bytes)], old=old, now=NOW)


@pytest.mark.parametrize(
    ("peak", "shown", "is_corrected"),
    [
        (0, "", False),
        (80 * CENTI, "20 % less than proven: the proof counts, for caches may not have been full yet", False),
        (86 * CENTI, "as proven", False),
        (115 * CENTI, "as proven", False),
        (120 * CENTI, "20 % more than proven: the measured figure counts", True),
    ],
)  # fmt: skip
def test_what_describe_shows(peak: int, shown: str, *, is_corrected: bool) -> None:
    assert memory_proof.compare_with_peak(PROOF, peak) == shown
    found = find_condition(of(peak).conditions, "ProofCorrected")
    assert (found is not None) is is_corrected


def test_what_a_correction_says() -> None:
    found = find_condition(of(5 * GIB // 4).conditions, "ProofCorrected")
    assert found is not None
    assert (found.status, found.reason) == (ConditionStatus.TRUE, "MeasuredMore")
    assert found.message == (
        "qwen-0 took 1.2 GiB on a, 25 % more than the 1.0 GiB that its memory proof says. 1.2 GiB "
        "count on a from now on; set spec.resources.memory to 2Gi, so that new replicas are placed "
        "with that as well"
    )
    said = of(3 * GIB, memory=PROOF.model_copy(update={"override_bytes": 2 * GIB}))
    found = find_condition(said.conditions, "ProofCorrected")
    assert found is not None
    assert "50 % more than the 2.0 GiB that spec.resources.memory says. " in found.message


async def test_a_correction_is_told_once_for_each_step() -> None:
    clock = FakeClock()
    transport = MemoryTransport(clock)
    recorder = EventRecorder(transport, clock, source="reconciler")
    teller, seen = (
        DeploymentEvents(Lister(make_caches(transport, clock)), recorder),
        observed(deployment()),
    )
    old: Status | None = None
    for peak in (0, GIB, 2 * GIB, 2 * GIB, 3 * GIB, 0):
        new = of(peak, old=old)
        await teller.told_replica(seen, old, new)
        old = new
    events = [found.spec for found in await objects.list_all(transport, Event)]
    assert {(e.type, e.reason, e.about.kind, e.about.uid, e.count) for e in events} == {
        ("Warning", "ProofCorrected", "ModelDeployment", "uid-qwen", 1)
    }
    assert sorted(e.message[:22] for e in events) == [f"qwen-0 took {n}.0 GiB on" for n in (2, 3)]
