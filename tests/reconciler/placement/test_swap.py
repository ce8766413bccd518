"""Swap: which idle replicas give way for a model at zero."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from reconciler.deployments.placer import (
    PendingAssignment,
    PlacementOutcome,
    Placer,
    PreemptingAssignment,
)
from reconciler.placement.inputs import Allocation, NodeView, Rival, request_for
from reconciler.placement.load_times import load_s
from reconciler.placement.refusals import Unschedulable
from reconciler.placement.swap import (
    IdleReplica,
    LoadWait,
    next_use_s,
    residence_s,
    victims,
)
from reconciler.placement.table import NodeTable
from tests.support.world import GIB, deployment, node


def held(name: str, gib: float = 4, *, priority: int = 0, is_ending: bool = False) -> Allocation:
    return Allocation(
        replica=f"{name}-0",
        deployment=name,
        bytes=int(gib * GIB),
        priority=priority,
        is_ending=is_ending,
    )


def idle(value: float, *, stays_s: float = 0.0) -> IdleReplica:
    return IdleReplica(load_s=value, next_use_s=1.0, stays_s=stays_s)


def mac(name: str, *allocations: Allocation, gib: float = 8, disk_gbps: float = 0.0) -> NodeView:
    used = sum(allocation.bytes for allocation in allocations)
    fields: dict[str, Any] = {"allocations": allocations, "used_bytes": used}
    return node(name, memory_gib=gib, disk_gbps=disk_gbps, **fields)


def claim(nodes: list[NodeView], free: dict[str, IdleReplica] | None) -> PlacementOutcome:
    placer = Placer(NodeTable(nodes))
    return placer.claim(request_for(deployment(name="new", memory="4Gi")), free)


def names(outcome: PlacementOutcome) -> list[str]:
    assert isinstance(outcome, PreemptingAssignment)
    return [victim.replica for victim in outcome.victims]


def test_the_least_value_gives_way() -> None:
    nodes = [mac("a", held("x"), held("y")), mac("b", held("z"), held("busy"), disk_gbps=2.0)]
    free = {"x-0": idle(3), "y-0": idle(2), "z-0": idle(1)}
    outcome = claim(nodes, free)
    assert names(outcome) == ["z-0"]
    assert isinstance(outcome, PreemptingAssignment)
    assert outcome.is_swap
    assert outcome.node == "b"
    assert outcome.why.note == "loads in 5 s: z-0 on b gives way"
    assert outcome.why.wait == LoadWait(seconds=load_s(2 * GIB, 2.0), gives_way=("z-0",))


def test_the_wait_is_that_of_the_last_load_on_the_mac_and_of_what_still_serves() -> None:
    placer = Placer(NodeTable([mac("a", held("x"), held("y"))]))
    request = request_for(deployment(name="new", memory="4Gi"), load_times={"a": 9.5})
    free = {"x-0": idle(1, stays_s=30), "y-0": idle(1, stays_s=20)}
    outcome = placer.claim(request, free)
    assert isinstance(outcome, Unschedulable)
    assert outcome.wait == LoadWait(seconds=29.5, gives_way=("y-0",))
    outcome = placer.claim(request, free | {"x-0": idle(1)})
    assert isinstance(outcome, PreemptingAssignment)
    assert outcome.why.wait == LoadWait(seconds=9.5, gives_way=("x-0",))


def test_nothing_gives_way_without_requests_at_zero_or_before_its_time() -> None:
    nodes = [mac("a", held("x"), held("y"))]
    for free, note in (
        (None, ""),
        ({}, "waits until a replica that may give way is idle"),
        ({"x-0": idle(1, stays_s=1)}, "waits until x-0 has served for its minimum time"),
    ):
        outcome = claim(nodes, free)
        assert isinstance(outcome, Unschedulable)
        assert outcome.note == note
    outcome = claim([mac("a", gib=3)], {})
    assert isinstance(outcome, Unschedulable)
    assert outcome.note == "", "it fits no Mac, however idle that is"


def test_a_higher_priority_stays() -> None:
    nodes = [mac("a", held("x", priority=1), held("y"))]
    assert names(claim(nodes, {"x-0": idle(1), "y-0": idle(9)})) == ["y-0"]
    assert not isinstance(claim(nodes, {"x-0": idle(1)}), PreemptingAssignment)


def test_an_idle_one_gives_way_before_a_lower_priority_is_cut() -> None:
    nodes = [mac("a", held("low", priority=-1), held("y"))]
    assert names(claim(nodes, {"y-0": idle(9)})) == ["y-0"]


def test_nothing_more_gives_way_while_enough_memory_drains() -> None:
    nodes = [mac("a", held("x", is_ending=True), held("y"))]
    outcome = claim(nodes, {"y-0": idle(1)})
    assert isinstance(outcome, PendingAssignment)
    assert outcome.why.note == "waits until x-0 on a has ended, and then loads in 6 s"


def test_what_waits_longer_goes_first() -> None:
    earlier = request_for(deployment(name="earlier", memory="4Gi"))
    placer = Placer(NodeTable([mac("a", held("x"), held("y"))]))
    free = {"x-0": idle(1), "y-0": idle(2)}
    placer.claim_missing(Rival(request=earlier, missing=2, waits_at_zero=True), free)
    # Of the two only the first makes others give way.
    assert placer.assumed.victims == {"x-0"}
    assert names(placer.claim(request_for(deployment(name="new", memory="4Gi")), free)) == ["y-0"]


def test_seconds() -> None:
    assert load_s(8_000_000_000, 2.0) == 8.0
    assert load_s(8_000_000_000, 0.0) == 12.0, "a disk that was not measured"
    assert (residence_s(8), residence_s(30)) == (60, 120)
    assert next_use_s(9, 60) < next_use_s(9, 120) < next_use_s(3, 120) < next_use_s(0, 120)


SIZES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.booleans()), max_size=6)


@given(SIZES, st.integers(1, 30))
def test_victims_free_enough_and_none_of_them_is_unnecessary(
    sizes: list[tuple[int, int, bool]], short: int
) -> None:
    allocations = [
        Allocation(replica=f"r{at}", deployment=f"d{at}", bytes=size)
        for at, (size, _, _) in enumerate(sizes)
    ]
    free = {
        f"r{at}": idle(value, stays_s=float(stays)) for at, (_, value, stays) in enumerate(sizes)
    }
    chosen = victims(allocations, free, priority=0, short_bytes=short)
    may_go = [allocation for allocation in allocations if free[allocation.replica].stays_s <= 0]
    if chosen is None:
        assert sum(allocation.bytes for allocation in may_go) < short
        return
    assert set(chosen) <= set(may_go)
    freed = sum(allocation.bytes for allocation in chosen)
    assert freed - min(allocation.bytes for allocation in chosen) < short <= freed
    assert victims(list(reversed(allocations)), free, priority=0, short_bytes=short) == chosen
