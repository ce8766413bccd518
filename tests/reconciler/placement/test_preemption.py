"""Preemption: the fewest victims, of those the lowest priority, never an equal one."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.deployments.placer import (
    Assignment,
    PendingAssignment,
    Placer,
    PreemptingAssignment,
)
from reconciler.placement.inputs import Allocation, NodeView, PlacementRequest, request_for
from reconciler.placement.memory_proof import prove
from reconciler.placement.preemption import choose_victims
from reconciler.placement.refusals import Unschedulable, summary_line
from reconciler.placement.table import NodeTable
from schemas.node import ModelReport
from schemas.placement import Placement
from tests.support.reconciler_nodes import allocations, fleets, wants
from tests.support.world import GEOMETRY, GIB, deployment, node

NEED = prove(GEOMETRY, context_length=1024, concurrency=1).total_bytes


def tenant(name: str, gib: float, priority: int = 0, *, is_ending: bool = False) -> Allocation:
    return Allocation(
        replica=name,
        deployment=name.rpartition("-")[0],
        bytes=int(gib * GIB),
        priority=priority,
        is_ending=is_ending,
    )


def crowded(name: str, *there: Allocation, free_gib: float = 0) -> NodeView:
    """Return a node with these tenants, and so much free beside them."""
    used = sum(allocation.bytes for allocation in there)
    return replace(
        node(name),
        allocatable_bytes=used + int(free_gib * GIB),
        used_bytes=used,
        allocations=there,
        replicas={allocation.deployment: 1 for allocation in there},
    )


def claim(
    *nodes: NodeView, of: PlacementRequest | None = None
) -> Assignment | PendingAssignment | PreemptingAssignment | Unschedulable:
    return Placer(NodeTable(nodes)).claim(of or request_for(deployment(priority=10)))


def names(found: object) -> tuple[str, ...]:
    assert isinstance(found, PreemptingAssignment)
    return tuple(victim.replica for victim in found.victims)


@pytest.mark.parametrize(
    ("there", "wanted"),
    [
        pytest.param([("a", 4, 5), ("b", 2, 0), ("c", 2, 0)], ["a"], id="few-before-low"),
        pytest.param([("a", 4, 10)], None, id="never-an-equal"),
        pytest.param([("a", 4, 0), ("b", 4, 0)], ["a"], id="equals-by-name"),
        pytest.param([("a", 3, 0), ("b", 4, 0)], ["b"], id="of-equals-the-larger"),
    ],
)
def test_victims(there: list[tuple[str, int, int]], wanted: list[str] | None) -> None:
    tenants = [tenant(name, gib, priority) for name, gib, priority in there]
    victims = choose_victims(tenants, priority=10, short_bytes=3 * GIB)
    assert (None if victims is None else [victim.replica for victim in victims]) == wanted


def test_of_equal_victims_the_one_whose_model_others_have_goes() -> None:
    """The replacement of the other one would fetch 40 GiB again."""
    report = ModelReport(path="qwen", geometry=GEOMETRY)
    rare = ModelReport(path="rare", geometry=GEOMETRY, missing_bytes=40 * GIB)
    whole = rare.model_copy(update={"missing_bytes": 0})
    first = tenant("a-0", 4)._replace(model="rare")
    second = tenant("z-0", 4)._replace(model="qwen")
    there = replace(crowded("a", first, second), models={"qwen": report, "rare": whole})
    full = replace(crowded("b"), models={"qwen": report, "rare": rare})
    assert names(claim(there, full)) == ("z-0",)
    # Once the other node has the files as well, nothing but the names differs.
    assert names(claim(there, replace(full, models=there.models))) == ("a-0",)
    # A node that takes no replicas does not count.
    away = replace(full, models=there.models, name="c", is_cordoned=True)
    assert names(claim(there, full, away)) == ("z-0",)


def test_of_equal_nodes_the_one_whose_victim_fetches_the_least_gives_way() -> None:
    def crowded_by(name: str, victim: str, **missing_gib: int) -> NodeView:
        models = {
            path: ModelReport(path=path, geometry=GEOMETRY, missing_bytes=gib * GIB)
            for path, gib in {"qwen": 0, **missing_gib}.items()
        }
        return replace(
            crowded(name, tenant(f"{victim}-0", 4)._replace(model=victim)), models=models
        )

    nodes = [crowded_by("a", "x", x=0, y=8), crowded_by("b", "y", x=40, y=0)]
    assert names(claim(*nodes)) == ("y-0",)


@given(allocations, st.integers(1, 8 * GIB))
def test_no_other_set_is_smaller_or_lower(there: tuple[Allocation, ...], short: int) -> None:
    victims = choose_victims(there, priority=1, short_bytes=short)
    lower = [
        allocation for allocation in there if allocation.priority < 1 and not allocation.is_ending
    ]
    enough = [
        sorted(allocation.priority for allocation in some)
        for size in range(1, len(lower) + 1)
        for some in combinations(lower, size)
        if sum(allocation.bytes for allocation in some) >= short
    ]
    if not enough:
        assert victims is None
        return
    assert victims is not None
    assert all(victim in lower for victim in victims)
    assert sum(victim.bytes for victim in victims) >= short
    best = min(enough, key=lambda some: (len(some), some))
    assert sorted(victim.priority for victim in victims) == best


@pytest.mark.parametrize(
    ("nodes", "victims"),
    [
        pytest.param(
            [crowded("a", tenant("x-0", 2), tenant("y-0", 2)), crowded("b", tenant("z-0", 4, priority=5))],
            ("z-0",), id="the-node-where-the-fewest-have-to-go",
        ),
        pytest.param(
            [crowded("a", tenant("x-0", 4, priority=5)), crowded("b", tenant("y-0", 4, priority=-5))],
            ("y-0",), id="of-equal-nodes-the-one-where-they-are-lower",
        ),
    ],
)  # fmt: skip
def test_the_node_of_the_victims(nodes: list[NodeView], victims: tuple[str, ...]) -> None:
    assert names(claim(*nodes)) == victims


def test_free_memory_is_taken_before_a_replica_is_displaced() -> None:
    outcome = claim(crowded("a", tenant("low-0", 8)), node("b"))
    assert isinstance(outcome, Assignment)
    assert outcome.node == "b"


def test_the_note_names_the_victims() -> None:
    outcome = claim(crowded("a", tenant("low-0", 4)))
    assert isinstance(outcome, PreemptingAssignment)
    assert summary_line(outcome.why) == (
        "0/1 nodes fit: 1 short of memory (need 2.8 GiB, best has 0 B); "
        "preempts low-0 on a, which frees 4.0 GiB"
    )


def test_it_waits_for_those_that_end_already() -> None:
    ending = crowded("a", tenant("low-0", 4, is_ending=True))
    outcome = claim(ending, crowded("b", tenant("low-1", 4)))
    assert isinstance(outcome, PendingAssignment)
    assert summary_line(outcome.why).endswith("; waits until low-0 on a has ended")


def test_neither_an_equal_nor_a_label_is_overcome() -> None:
    there = crowded("a", tenant("x-0", 4, priority=10), tenant("y-0", 4, priority=11))
    assert isinstance(claim(there), Unschedulable)
    picky = deployment(priority=10, placement=Placement(node_selector={"rack": "1"}))
    assert isinstance(claim(crowded("a", tenant("low-0", 4)), of=request_for(picky)), Unschedulable)


def test_each_replica_preempts_another_victim() -> None:
    placer = Placer(NodeTable([crowded("a", tenant("x-0", 4)), crowded("b", tenant("y-0", 4))]))
    wanted = request_for(deployment(priority=10))
    assert [names(placer.claim(wanted)) for _ in range(2)] == [("x-0",), ("y-0",)]
    assert isinstance(placer.claim(wanted), Unschedulable)


def test_reserved_memory_is_not_assigned_to_others() -> None:
    placer = Placer(NodeTable([crowded("a", tenant("x-0", 2), free_gib=2)]))
    assert names(placer.claim(request_for(deployment(priority=10)))) == ("x-0",)
    verdict = placer.claim(request_for(deployment(name="small", memory="1500Mi")))
    assert isinstance(verdict, Unschedulable)
    assert "(2.8 GiB are reserved for a higher priority)" in verdict.refusals[0][1].message


@given(fleets, wants())
def test_the_victims_free_enough_memory(
    fleet: tuple[NodeView, ...], want: PlacementRequest
) -> None:
    outcome = Placer(NodeTable(fleet)).claim(want)
    if not isinstance(outcome, PreemptingAssignment):
        return
    there = next(view for view in fleet if view.name == outcome.node)
    assert outcome.victims
    assert all(victim in there.allocations for victim in outcome.victims)
    assert all(victim.priority < want.spec.priority for victim in outcome.victims)
    assert not any(victim.is_ending for victim in outcome.victims)
    ended = replace(
        there,
        used_bytes=there.used_bytes
        - sum(
            allocation.bytes
            for allocation in there.allocations
            if allocation.is_ending or allocation in outcome.victims
        ),
        allocations=(),
        replicas={want.name: there.replicas.get(want.name, 0)},
    )
    assert isinstance(Placer(NodeTable([ended])).place(want), Assignment)
