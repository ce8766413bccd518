"""The order in which the engines of a node load."""

from datetime import timedelta
from itertools import permutations

import pytest

from nodeagent.replicas.start_queue import StartRequest, place_in_queue
from tests.support.nodeagent_plans import NOW


def request(name: str, priority: int = 0, restarts: int = 0, age_s: float = 0) -> StartRequest:
    return StartRequest(
        replica=name,
        priority=priority,
        restarts=restarts,
        created_at=NOW - timedelta(seconds=age_s),
        ordinal=int(name.rpartition("-")[2]),
    )


URGENT = request("chat-0", priority=10)
OLD = request("old-7", age_s=60)
FIRST, SECOND = request("code-2"), request("code-10")
FAILING = request("broken-0", restarts=4, age_s=900)
ORDER = (URGENT, OLD, FIRST, SECOND, FAILING)


def test_priority_comes_first_then_fewest_failures_then_age_then_the_ordinal() -> None:
    for waiting in permutations(ORDER):
        places = [
            place_in_queue(start_request, waiting, loading=2, limit=2) for start_request in ORDER
        ]
        assert places == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("loading", "limit", "starting"), [
    (0, 1, 1), (0, 2, 2), (1, 2, 1), (2, 2, 0), (5, 2, 0), (0, 99, 5),
])  # fmt: skip
def test_as_many_start_as_there_are_places(loading: int, limit: int, starting: int) -> None:
    places = [
        place_in_queue(start_request, ORDER, loading=loading, limit=limit)
        for start_request in ORDER
    ]
    assert places == [max(0, at + 1 - starting) for at in range(len(ORDER))]
