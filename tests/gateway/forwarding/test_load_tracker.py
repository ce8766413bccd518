"""Load and ejections: live, exact for own requests, and expiring for reported ones."""

import asyncio
import random

import pytest

from gateway.forwarding import forwarder
from gateway.forwarding.load_tracker import LoadTracker
from gateway.forwarding.retry_state import WholeResponse
from tests.support.gateway_world import target

ONE, OTHER = target("m-0", port=1), target("m-1", port=2)


def loads() -> LoadTracker:
    return LoadTracker(random.Random(1))


def told(running: bytes, queued: bytes = b"0", free: bytes = b"") -> dict[bytes, bytes]:
    return {
        b"x-fleet-in-flight": running,
        b"x-fleet-queued": queued,
        b"x-fleet-memory-free": free,
    }


def test_the_view_is_live_and_the_same_object() -> None:
    found = loads()
    health = found.health(0.0)
    found.begin(ONE)
    found.begin(ONE)
    assert dict(health.in_flight) == {ONE.origin: 2}
    found.outliers.record_failure(ONE, "gone", 0.0)
    assert set(health.ejected) == {ONE.origin}
    found.end(ONE)
    found.end(ONE)
    assert not health.in_flight
    assert found.health(1.0) is health
    assert found.by_deployment() == {"m": 0}


def test_others_load_is_what_an_engine_says_without_what_is_ours() -> None:
    found = loads()
    health = found.health(0.0)
    found.begin(ONE)
    found.record_report(ONE.origin, told(b"3", b"2"), 0.0)
    assert health.others_in_flight[ONE.origin] == 4
    found.record_report(ONE.origin, told(b"0"), 0.0)
    assert health.others_in_flight[ONE.origin] == 0


def test_words_are_forgotten_after_a_few_seconds_and_memory_with_its_engine() -> None:
    found = loads()
    health = found.health(0.0)
    found.record_report(ONE.origin, told(b"3", free=b"25"), 0.0)
    found.drop_old(2.9)
    assert health.others_in_flight == {ONE.origin: 3}
    found.drop_old(3.1)
    assert not health.others_in_flight
    assert health.headroom == {ONE.origin: 0.25}
    found.set_endpoints([OTHER.origin])
    assert not health.headroom


@pytest.mark.parametrize(
    "headers",
    [{}, told(b"many"), told(b"-1"), told(b"1", b""), told(b"9" * 4300), told(b"1", b"9" * 30)],
)
def test_what_is_no_number_is_no_word(headers: dict[bytes, bytes]) -> None:
    found = loads()
    found.record_report(ONE.origin, headers, 0.0)
    assert not found.health(0.0).others_in_flight


def test_more_than_all_memory_is_all_of_it() -> None:
    found = loads()
    found.record_report(ONE.origin, told(b"1", free=b"999"), 0.0)
    assert found.health(0.0).headroom == {ONE.origin: 1.0}


def test_a_rest_ends_by_itself() -> None:
    found = loads()
    found.outliers.record_failure(ONE, "bad", 0.0)
    found.outliers.record_failure(OTHER, "full", 0.0, pause_s=4.0)
    assert found.health(0.9).ejected == {ONE.origin, OTHER.origin}
    assert found.health(1.1).ejected == {OTHER.origin}
    assert not found.health(4.1).ejected


def test_a_republished_endpoint_starts_anew() -> None:
    outliers = loads().outliers
    outliers.set_endpoints([ONE, OTHER], 0.0)
    outliers.record_failure(ONE, "gone", 0.0)
    outliers.record_failure(OTHER, "gone", 0.0)
    again = target("m-0", port=1, version=2)
    outliers.set_endpoints([again, OTHER], 1.0)
    assert outliers.ejected(1.0) == {OTHER.origin}
    assert outliers.phases(1.0) == {"m-0": 0, "m-1": 2}
    # A late failure from before the restart does not count for long.
    outliers.record_failure(again, "bad", 1.0)
    assert outliers.ejected(1.5) == {ONE.origin, OTHER.origin}
    assert outliers.ejected(2.1) == {OTHER.origin}
    outliers.set_endpoints([again], 3.0)
    assert not outliers.ejected(3.0)


def test_one_on_trial_is_shunned_by_all_others() -> None:
    outliers = loads().outliers
    for _ in range(3):
        outliers.record_failure(ONE, "bad", 0.0)
    assert not outliers.ejected(2.0)
    assert outliers.begin_trial(ONE, 2.0)
    assert outliers.ejected(2.0) == {ONE.origin}
    outliers.abandon_trial(ONE, 2.1)
    assert not outliers.ejected(2.1)
    assert outliers.begin_trial(ONE, 2.2)
    outliers.record_success(ONE, 2.2, 2.5)
    assert not outliers.ejected(2.5)
    outliers.drop_old(30.0)
    assert outliers.phases(30.0) == {}


def whole(name: str) -> WholeResponse:
    return WholeResponse(endpoint=target(name), status=200, headers=[], body=b"")


async def later(result: WholeResponse | None, turns: int = 1) -> WholeResponse | None:
    for _ in range(turns):
        await asyncio.sleep(0)
    return result


async def never() -> None:
    await asyncio.Event().wait()


async def test_no_hedge_without_need() -> None:
    def rival() -> None:
        raise AssertionError("nobody is to be asked")

    assert await forwarder.race(later(whole("m-0")), rival, after_s=60.0) == whole("m-0")
    assert await forwarder.race(later(None), rival, after_s=60.0) is None


async def test_the_first_result_wins_and_a_failure_leaves_it_to_the_other() -> None:
    async def raced(
        first: forwarder.AttemptCoroutine, second: forwarder.AttemptCoroutine | None
    ) -> forwarder.AttemptResult:
        return await forwarder.race(first, lambda: second, after_s=0.0)

    assert await raced(never(), later(whole("m-1"))) == whole("m-1")
    assert await raced(later(whole("m-0"), 9), later(None)) == whole("m-0")
    assert await raced(later(None, 9), later(whole("m-1"), 20)) == whole("m-1")
    assert await raced(later(None, 9), later(None)) is None
    assert await raced(later(whole("m-0"), 9), None) == whole("m-0")
