"""How long nodes are away."""

from hypothesis import given
from hypothesis import strategies as st

from reconciler.nodelife import NodeLife


def test_grace() -> None:
    life = NodeLife(30)
    life.look(["a", "b"], {"a", "b"}, 0)
    assert life.lost(1000) == frozenset()
    assert life.next_look_s(["a", "b"], 1000) is None
    life.look(["a", "b"], {"a"}, 100)
    assert life.next_look_s(["a", "b"], 110) == 20
    assert life.next_look_s(["a"], 110) is None
    assert life.lost(129) == frozenset()
    assert life.lost(130) == {"b"}
    assert life.next_look_s(["a", "b"], 130) is None


def test_looking_again_does_not_start_the_grace_anew() -> None:
    life = NodeLife(30)
    life.look(["a"], set(), 0)
    life.look(["a"], set(), 29)
    assert life.lost(30) == {"a"}


def test_a_node_that_came_back_has_the_whole_grace_again() -> None:
    life = NodeLife(30)
    life.look(["a"], set(), 0)
    life.look(["a"], {"a"}, 20)
    life.look(["a"], set(), 25)
    assert life.lost(54) == frozenset()
    assert life.lost(55) == {"a"}


def test_the_first_grace_to_end_is_the_next_look() -> None:
    life = NodeLife(30)
    life.look(["a"], set(), 0)
    life.look(["a", "b"], set(), 10)
    assert life.next_look_s(["a", "b"], 20) == 10
    assert life.next_look_s(["a", "b"], 35) == 5


def test_without_grace_a_node_is_lost_at_once() -> None:
    life = NodeLife(0)
    life.look(["a"], set(), 7.3)
    assert life.lost(7.3) == {"a"}


times = st.floats(0, 1e6, allow_nan=False)


@given(since=times, grace=times, passed=times)
def test_a_node_away_is_lost_or_looked_at_again(since: float, grace: float, passed: float) -> None:
    life = NodeLife(grace)
    life.look(["a"], set(), since)
    for now in (since + passed, since + grace):
        assert (life.next_look_s(["a"], now) is None) == ("a" in life.lost(now))
