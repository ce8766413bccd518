"""The queue of a name: first come, first served, never more than are allowed, and nobody is forgotten."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.forwarding import admission
from gateway.forwarding.admission import LEAST_RETRY_S, MOST_RETRY_S, Slot, SlotQueue
from gateway.forwarding.policy import QueuePolicy


def lines(concurrency: int, depth: int) -> QueuePolicy:
    return QueuePolicy(concurrency=concurrency, depth=depth, timeout_s=30.0)


def entered(queue: SlotQueue, now_s: float = 0.0) -> Slot:
    place = queue.enter(now_s)
    assert place is not None
    return place


def test_so_many_run_so_many_wait_and_the_rest_is_turned_away() -> None:
    queue = SlotQueue(lines(2, 1))
    places = [queue.enter(0.0) for _ in range(4)]
    assert [place and place.is_through for place in places] == [True, True, False, None]


@pytest.mark.parametrize(
    ("concurrency", "said"),
    [(1, "1 is being answered and 1 waits,"), (2, "2 are being answered and 1 waits,")],
)
def test_who_is_turned_away_is_told_how_many_there_are(concurrency: int, said: str) -> None:
    queue = SlotQueue(lines(concurrency, 1))
    for _ in range(concurrency + 1):
        entered(queue)
    assert said in admission.queue_full("m", queue, 1).message


def test_who_leaves_makes_room_for_who_waits_longest() -> None:
    queue = SlotQueue(lines(1, 3))
    first, second, third = (entered(queue) for _ in range(3))
    assert queue.leave(first, 1.0) == [second]
    assert queue.leave(second, 2.0) == [third]
    assert queue.leave(second, 2.0) == []  # once is enough
    assert (queue.running, queue.waiting) == (1, 0)


def test_who_gives_up_waiting_makes_room_in_the_queue() -> None:
    queue = SlotQueue(lines(1, 1))
    first, second = entered(queue), entered(queue)
    assert queue.enter(0.0) is None
    assert queue.leave(second, 1.0) == []
    third = entered(queue)
    assert queue.leave(first, 2.0) == [third]


def test_more_room_is_used_at_once_and_less_sends_nobody_away() -> None:
    queue = SlotQueue(lines(1, 5))
    places = [entered(queue) for _ in range(4)]
    assert queue.change(lines(3, 5)) == places[1:3]
    assert queue.change(lines(1, 0)) == []
    assert (queue.running, queue.waiting) == (3, 1)
    assert queue.leave(places[0], 1.0) == []
    assert queue.change(None) == places[3:]


def test_when_to_come_again_follows_from_the_pace() -> None:
    queue = SlotQueue(lines(1, 100))
    running = entered(queue)
    waiting = [entered(queue) for _ in range(9)]
    for second in range(1, 4):  # one in two seconds
        queue.leave(running, second * 2.0)
        running = waiting.pop(0)
    assert queue.retry_after_s(6.0) == 14  # six wait before it


def test_without_a_pace_it_is_a_second_and_never_more_than_a_minute() -> None:
    assert SlotQueue(lines(1, 0)).retry_after_s(0.0) == LEAST_RETRY_S
    queue = SlotQueue(lines(1, 100))
    entered(queue)
    for _ in range(50):
        entered(queue)
    assert queue.retry_after_s(1000.0) == MOST_RETRY_S


moves = st.lists(st.tuples(st.sampled_from(["enter", "leave", "change"]), st.integers(0, 5)))


@given(moves)
def test_whatever_happens(story: list[tuple[str, int]]) -> None:
    """Nobody overtakes, nobody waits beside a free place, and the bounds hold."""
    queue, limit = SlotQueue(lines(2, 3)), lines(2, 3)
    inside: list[Slot] = []
    for now, (what, number) in enumerate(story):
        before, through = queue.running, [p for p in inside if p.is_through]
        if what == "enter":
            place = queue.enter(float(now))
            if place is not None:
                inside.append(place)
            else:
                assert queue.waiting >= limit.depth
        elif what == "leave" and inside:
            queue.leave(inside.pop(number % len(inside)), float(now))
        elif what == "change":
            limit = lines(number + 1, number)
            queue.change(limit)
        order = [place.is_through for place in inside]
        assert order == sorted(order, reverse=True)
        assert queue.running == sum(order)
        assert queue.waiting == len(order) - sum(order)
        if queue.running > limit.concurrency:
            assert queue.running <= max(before, len(through))  # a bound that came later
        assert not queue.waiting or queue.running >= limit.concurrency
