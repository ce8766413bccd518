"""What the columns decide is what the readable functions decide, node by node, on any fleet."""

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from reconciler.observe import NodeView
from reconciler.placement.explain import explain, summary
from reconciler.placement.place import Placed, Placer, place
from reconciler.placement.refusals import Unschedulable, one_line, refusals
from reconciler.placement.table import Table
from reconciler.placement.want import Want
from tests.reconciler.placement.fleets import NAMES, fleets, wants
from tests.support.examples import few

Fleet = tuple[NodeView, ...]


def counts(found: Unschedulable) -> set[tuple[str, int, int, int]]:
    """Return the tallies without words: of nodes that say different things, any may speak for all."""
    return {
        (t.reason, t.count, *((t.need, t.have) if t.reason == "InsufficientMemory" else (0, 0)))
        for t in found.tallies
    }


def fill(want: Want, fleet: Fleet, row: str) -> Fleet:
    """Return the fleet with one more replica on a node, as observing would show it."""
    (taken,) = [node for node in fleet if node.name == row]
    memory = explain(want, [taken])[0].memory
    assert memory is not None
    after = replace(
        taken,
        used_bytes=taken.used_bytes + memory.total_bytes,
        replicas={**taken.replicas, want.name: taken.replicas.get(want.name, 0) + 1},
    )
    return tuple(after if node is taken else node for node in fleet)


@settings(max_examples=few(100))
@given(fleets, st.lists(wants(), min_size=2, max_size=2), st.integers(1, 6))
def test_columns_decide_as_the_functions_do(fleet: Fleet, wanted: list[Want], number: int) -> None:
    other = replace(wanted[1], name="llama")
    placer = Placer(Table(fleet))
    for want in (wanted[0], other) * number:
        told = explain(want, fleet)
        ranking = placer._ranking(want)
        why = refusals(placer.draft, want, ranking)
        scored = {one.node: one.score if one.fits else -math.inf for one in told}
        assert ranking._score.tolist() == [scored[name] for name in sorted(scored)]
        assert counts(why) == counts(summary(told))
        assert why.refusals == summary(told).refusals
        outcome = placer.place(want)
        if not told or not told[0].fits:
            assert outcome == why
            continue
        assert isinstance(outcome, Placed)
        assert (outcome.node, outcome.memory) == (told[0].node, told[0].memory)
        fleet = fill(want, fleet, outcome.node)


@settings(max_examples=few(100))
@given(fleets, wants())
def test_the_order_of_nodes_decides_nothing(fleet: Fleet, want: Want) -> None:
    assert place(want, fleet) == place(want, tuple(reversed(fleet)))
    assert explain(want, fleet) == explain(want, tuple(reversed(fleet)))


@settings(max_examples=few(100))
@given(fleets, fleets, st.lists(wants(), min_size=2, max_size=2), st.sets(st.sampled_from(NAMES)))
def test_a_table_made_from_the_one_before_is_like_a_new_one(
    before: Fleet, other: Fleet, wanted: list[Want], changed: set[str]
) -> None:
    old = Table(before)
    Placer(old).place(wanted[0])  # so that there are answers to take over
    after = tuple(renewed(node, other) if node.name in changed else node for node in before)
    made, new = Table(after, before=old), Table(after)
    for name in ("allocatable", "used", "ending", "promised"):
        assert getattr(made, name).tolist() == getattr(new, name).tolist()
    assert {name: rows for name, rows in made.counts.items() if rows} == new.counts
    assert same_outcomes(made, new, wanted)
    assert same_outcomes(Table(other, before=old), Table(other), wanted)


def renewed(node: NodeView, other: Fleet) -> NodeView:
    """Return the node with other tenants, or another node of the name."""
    namesake = next((one for one in other if one.name == node.name), None)
    if namesake is not None:
        return namesake
    return replace(node, used_bytes=7, tenants=(), replicas={"llama": 1}, promised_bytes=3)


def same_outcomes(one: Table, another: Table, wanted: list[Want]) -> bool:
    mine, theirs = Placer(one), Placer(another)
    return all(mine.claim(want) == theirs.claim(want) for want in (*wanted, *wanted))


@settings(max_examples=few(100))
@given(fleets, wants())
def test_every_node_that_refuses_says_why(fleet: Fleet, want: Want) -> None:
    for one in explain(want, fleet):
        if one.refusal is None:
            assert one.memory is not None
            assert one.memory.total_bytes <= one.room_bytes
            assert 0 <= one.score <= 100
            assert all(0 <= part.score <= 100 for part in one.parts)
        else:
            assert one.refusal.reason
            assert one.refusal.message


@settings(max_examples=few(100))
@given(fleets, wants())
def test_the_line_counts_every_node(fleet: Fleet, want: Want) -> None:
    outcome = place(want, fleet)
    if isinstance(outcome, Unschedulable) and fleet:
        assert sum(tally.count for tally in outcome.tallies) == len(fleet)
        assert one_line(outcome).startswith(f"0/{len(fleet)} nodes fit: ")


@settings(max_examples=few(100))
@given(fleets, wants(), st.integers(1, 12))
def test_no_node_is_given_more_than_it_has(fleet: Fleet, want: Want, number: int) -> None:
    placer = Placer(Table(fleet))
    given_: dict[str, int] = {}
    for _ in range(number):
        outcome = placer.claim(want)
        if isinstance(outcome, Placed):
            size = outcome.memory.total_bytes
            given_[outcome.node] = given_.get(outcome.node, 0) + size
    for node in fleet:
        assert given_.get(node.name, 0) <= max(0, node.room_bytes)
