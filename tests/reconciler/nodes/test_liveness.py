"""Node liveness: how long nodes are away, and how often they come back."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.nodes.liveness import NodeLiveness


def test_grace() -> None:
    life = NodeLiveness(30)
    assert life.update(["a", "b"], {"a", "b"}, 0) == frozenset()
    assert life.lost(1000) == frozenset()
    assert life.requeue_after_s(["a", "b"], 1000) is None
    assert life.update(["a", "b"], {"a"}, 100) == {"b"}
    assert life.update(["a", "b"], {"a"}, 105) == frozenset()
    assert life.requeue_after_s(["a", "b"], 110) == 20
    assert life.requeue_after_s(["a"], 110) is None
    assert life.lost(129) == frozenset()
    assert life.lost(130) == {"b"}
    assert life.requeue_after_s(["a", "b"], 130) is None


def test_a_returned_node_gets_the_whole_grace_period_and_a_repeated_update_none() -> None:
    life = NodeLiveness(30)
    for now in (0, 19):
        life.update(["a"], set(), now)
    assert life.update(["a"], {"a"}, 20) == {"a"}
    for now in (25, 54):
        life.update(["a"], set(), now)
    assert life.lost(54) == frozenset()
    assert life.lost(55) == {"a"}


def test_the_first_grace_period_that_ends_requeues() -> None:
    life = NodeLiveness(30)
    life.update(["a"], set(), 0)
    life.update(["a", "b"], set(), 10)
    assert life.requeue_after_s(["a", "b"], 20) == 10
    assert life.requeue_after_s(["a", "b"], 35) == 5


times = st.floats(0, 1e6, allow_nan=False)


@given(since=times, grace=times, passed=times)
def test_an_absent_node_is_lost_or_requeued(since: float, grace: float, passed: float) -> None:
    life = NodeLiveness(grace)
    life.update(["a"], set(), since)
    for now in (since + passed, since + grace):
        assert (life.requeue_after_s(["a"], now) is None) == ("a" in life.lost(now))


WALL = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)


def come_and_go(
    life: NodeLiveness, times_: int, *, every_s: float = 10.0, start: float = 0.0
) -> float:
    """Let node a go away and come back `times` times; return the time of its last return."""
    now = start
    for _ in range(times_):
        life.update(["a"], set(), now)
        now += every_s
        life.update(["a"], {"a"}, now)
        now += every_s
    return now - every_s


@pytest.mark.parametrize(
    ("returns", "held_s"),
    [(0, 0), (1, 0), (2, 0), (3, 30), (4, 60), (5, 120), (6, 240), (7, 480), (8, 900), (2000, 900)],
)
def test_each_return_is_held_against_it_for_longer(returns: int, held_s: float) -> None:
    life = NodeLiveness(30)
    life.update(["a"], {"a"}, 0)
    back = come_and_go(life, returns)
    assert ("a" in life.flapping(back, WALL)) == (held_s > 0)
    assert life.next_release_s(back) == (held_s or None)
    assert life.flapping(back + held_s, WALL) == {}
    assert life.next_release_s(back + held_s) is None
    if held_s:
        flap = life.flapping(back + held_s - 1, WALL)["a"]
        assert (flap.returns, flap.until) == (returns, back + held_s)
        assert flap.until_at == WALL + timedelta(seconds=1)


def test_messages_do_not_change_without_a_change() -> None:
    life = NodeLiveness(30)
    back = come_and_go(life, 3)
    first = life.flapping(back + 1, WALL)["a"]
    assert life.flapping(back + 2.0004, WALL + timedelta(seconds=1))["a"] is first
    back = come_and_go(life, 1, start=back + 5)
    assert life.flapping(back, WALL)["a"].returns == 4


def test_a_node_that_stays_is_forgiven() -> None:
    life = NodeLiveness(30)
    back = come_and_go(life, 5)
    come_and_go(life, 1, start=back + 1799)
    assert life.flapping(back + 1850, WALL)["a"].returns == 6
    again = come_and_go(life, 1, start=back + 1799 + 10 + 1800)
    assert life.flapping(again, WALL) == {}
    # Having been away for long is not having stayed.
    come_and_go(life, 1, start=again + 20)
    life.update(["a"], set(), again + 100)
    life.update(["a"], {"a"}, again + 9000)
    assert life.flapping(again + 9000, WALL)["a"].returns == 3


def test_a_node_that_is_deleted_is_forgotten() -> None:
    life = NodeLiveness(30)
    back = come_and_go(life, 5)
    life.update([], set(), back)
    assert life.flapping(back, WALL) == {}
    life.update(["a"], {"a"}, back + 1)
    assert life.flapping(back + 1, WALL) == {}
    # One that goes while it is away did not come back when its name is there again.
    life.update(["a"], set(), back + 2)
    life.update([], set(), back + 3)
    life.update(["a"], {"a"}, back + 4)
    assert life.flapping(back + 4, WALL) == {}


@given(st.lists(st.tuples(st.floats(0.1, 3000), st.booleans()), max_size=40))
def test_a_held_back_node_is_ready_and_released_in_time(
    steps: list[tuple[float, bool]],
) -> None:
    life, now = NodeLiveness(30), 0.0
    for passed, is_ready in steps:
        now += passed
        life.update(["a"], {"a"} if is_ready else set(), now)
        held, release_s = life.flapping(now, WALL), life.next_release_s(now)
        assert (release_s is not None) == bool(held)
        if release_s is not None:
            assert 0 < release_s <= 900
            assert not life.flapping(now + release_s + 1e-6, WALL)
