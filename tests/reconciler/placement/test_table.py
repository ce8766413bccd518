"""Placement on random fleets: answers that are kept are those of a new table, and each node says why."""

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from reconciler.deployments.explain import explain_nodes, summarize
from reconciler.deployments.placer import Assignment, Placer, place_replica
from reconciler.placement import inputs
from reconciler.placement.inputs import Allocation, NodeView, PlacementRequest, request_for
from reconciler.placement.refusals import Unschedulable, collect_refusals, summary_line
from reconciler.placement.table import NodeTable
from tests.support.reconciler_nodes import HUB_MODEL, NAMES, fleets, wants
from tests.support.sampling import samples
from tests.support.world import deployment
from tests.support.world import node as make_node

Fleet = tuple[NodeView, ...]


def counts(found: Unschedulable) -> set[tuple[str, int, int, int]]:
    """Return the tallies without words: of nodes that say different things, any may speak for all."""
    return {
        (t.reason, t.count, *((t.need, t.have) if t.reason == "InsufficientMemory" else (0, 0)))
        for t in found.tallies
    }


def fill(want: PlacementRequest, fleet: Fleet, row: str) -> Fleet:
    """Return the fleet with one more replica on a node, as observing would show it."""
    (taken,) = [node for node in fleet if node.name == row]
    memory = explain_nodes(want, [taken])[0].memory
    assert memory is not None
    after = replace(
        taken,
        used_bytes=taken.used_bytes + memory.total_bytes,
        replicas={**taken.replicas, want.name: taken.replicas.get(want.name, 0) + 1},
    )
    return tuple(after if node is taken else node for node in fleet)


@settings(max_examples=samples(100))
@given(fleets, st.lists(wants(), min_size=2, max_size=2), st.integers(1, 6))
def test_the_ranking_after_decisions_is_that_of_a_new_observation(
    fleet: Fleet, wanted: list[PlacementRequest], number: int
) -> None:
    other = replace(wanted[1], name="llama")
    placer = Placer(NodeTable(fleet))
    for want in (wanted[0], other) * number:
        nodes = explain_nodes(want, fleet)
        ranking = placer._ranking(want)
        why = collect_refusals(placer.assumed, want, ranking)
        scored = {node.node: node.score if node.fits else -math.inf for node in nodes}
        assert ranking._score.tolist() == [scored[name] for name in sorted(scored)]
        assert counts(why) == counts(summarize(nodes))
        assert why.refusals == summarize(nodes).refusals
        outcome = placer.place(want)
        if not nodes or not nodes[0].fits:
            assert outcome == why
            continue
        assert isinstance(outcome, Assignment)
        assert (outcome.node, outcome.memory) == (nodes[0].node, nodes[0].memory)
        fleet = fill(want, fleet, outcome.node)


@settings(max_examples=samples(100))
@given(fleets, wants())
def test_the_order_of_nodes_decides_nothing(fleet: Fleet, want: PlacementRequest) -> None:
    assert place_replica(want, fleet) == place_replica(want, tuple(reversed(fleet)))
    assert explain_nodes(want, fleet) == explain_nodes(want, tuple(reversed(fleet)))


@settings(max_examples=samples(100))
@given(fleets, fleets, st.lists(wants(), min_size=2, max_size=2), st.sets(st.sampled_from(NAMES)))
def test_a_table_made_from_the_one_before_is_like_a_new_one(
    before: Fleet, other: Fleet, wanted: list[PlacementRequest], changed: set[str]
) -> None:
    old = NodeTable(before)
    Placer(old).place(wanted[0])  # so that there are answers to take over
    after = tuple(renewed(node, other) if node.name in changed else node for node in before)
    made, new = NodeTable(after, before=old), NodeTable(after)
    for name in ("allocatable", "used", "ending", "promised"):
        assert getattr(made, name).tolist() == getattr(new, name).tolist()
    assert {name: rows for name, rows in made.counts.items() if rows} == new.counts
    assert same_outcomes(made, new, wanted)
    assert same_outcomes(NodeTable(other, before=old), NodeTable(other), wanted)


def renewed(node: NodeView, other: Fleet) -> NodeView:
    """Return the node with other tenants, or another node of the name."""
    namesake = next((view for view in other if view.name == node.name), None)
    if namesake is not None:
        return namesake
    return replace(node, used_bytes=7, allocations=(), replicas={"llama": 1}, promised_bytes=3)


def same_outcomes(one: NodeTable, another: NodeTable, wanted: list[PlacementRequest]) -> bool:
    mine, theirs = Placer(one), Placer(another)
    return all(mine.claim(want) == theirs.claim(want) for want in (*wanted, *wanted))


@settings(max_examples=samples(100))
@given(fleets, wants(), st.integers(1, 2**40))
def test_a_node_that_lacks_more_bytes_never_wins_over_its_equal(
    fleet: Fleet, want: PlacementRequest, more: int
) -> None:
    spec = want.spec.model_copy(update={"model": HUB_MODEL, "kv_cache": None})
    want = replace(want, spec=spec)
    outcome = place_replica(want, fleet)
    if not isinstance(outcome, Assignment):
        return
    (best,) = [node for node in fleet if node.name == outcome.node]
    report = best.models[want.path]
    lacking = report.model_copy(update={"missing_bytes": report.missing_bytes + more})
    twin = replace(best, name="z", models={**best.models, want.path: lacking})
    again = place_replica(want, (*fleet, twin))
    assert isinstance(again, Assignment)
    assert again.node != "z"


@settings(max_examples=samples(100))
@given(fleets, wants())
def test_every_node_that_refuses_says_why(fleet: Fleet, want: PlacementRequest) -> None:
    for node in explain_nodes(want, fleet):
        if node.refusal is None:
            assert node.memory is not None
            assert node.memory.total_bytes <= node.room_bytes
            assert 0 <= node.score <= 100
            assert all(0 <= part.score <= 100 for part in node.parts)
        else:
            assert node.refusal.reason
            assert node.refusal.message


@settings(max_examples=samples(100))
@given(fleets, wants())
def test_the_line_counts_every_node(fleet: Fleet, want: PlacementRequest) -> None:
    outcome = place_replica(want, fleet)
    if isinstance(outcome, Unschedulable) and fleet:
        assert sum(tally.count for tally in outcome.tallies) == len(fleet)
        assert summary_line(outcome).startswith(f"0/{len(fleet)} nodes fit: ")


@settings(max_examples=samples(100))
@given(fleets, wants(), st.integers(1, 12))
def test_no_node_is_given_more_than_it_has(
    fleet: Fleet, want: PlacementRequest, number: int
) -> None:
    placer = Placer(NodeTable(fleet))
    given_: dict[str, int] = {}
    for _ in range(number):
        outcome = placer.claim(want)
        if isinstance(outcome, Assignment):
            size = outcome.memory.total_bytes
            given_[outcome.node] = given_.get(outcome.node, 0) + size
    for node in fleet:
        assert given_.get(node.name, 0) <= max(0, node.room_bytes)


def test_an_allocation_leaves_all_answers_valid() -> None:
    fleet = (make_node("a"), make_node("b"))
    before = NodeTable(fleet)
    before.evaluate(request_for(deployment()))
    allocation = Allocation(replica="qwen-0", deployment="qwen", bytes=1)
    taken = replace(fleet[0], used_bytes=1, replicas={"qwen": 1}, allocations=(allocation,))
    after = NodeTable([taken], before=before, are_all=False)
    assert after.answers is before.answers
    cordoned = NodeTable([replace(taken, is_cordoned=True)], before=after, are_all=False)
    assert inputs.CORDONED not in cordoned.answers.by_column
    assert inputs.READY in cordoned.answers.by_column
    assert [node.name for node in after.named(["b", "c", "a"])] == ["b", "a"]
