"""What a gateway knows of engines' load and standing: live, exact for its own requests, forgetful of others' words."""

import asyncio
import random

import pytest

from gateway.forwarding import forwarder
from gateway.forwarding.load_tracker import LoadTracker
from gateway.forwarding.retry_state import WholeResponse
from tests.gateway.world import target

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
    standing = found.standing(0.0)
    found.begin(ONE)
    found.begin(ONE)
    assert dict(standing.in_flight) == {ONE.origin: 2}
    found.circuits.failed(ONE, "gone", 0.0)
    assert set(standing.penalised) == {ONE.origin}
    found.end(ONE)
    found.end(ONE)
    assert not standing.in_flight
    assert found.standing(1.0) is standing
    assert found.by_deployment() == {"m": 0}


def test_others_load_is_what_an_engine_says_without_what_is_ours() -> None:
    found = loads()
    standing = found.standing(0.0)
    found.begin(ONE)
    found.hear(ONE.origin, told(b"3", b"2"), 0.0)
    assert standing.elsewhere[ONE.origin] == 4
    found.hear(ONE.origin, told(b"0"), 0.0)
    assert standing.elsewhere[ONE.origin] == 0


def test_words_are_forgotten_after_a_few_seconds_and_memory_with_its_engine() -> None:
    found = loads()
    standing = found.standing(0.0)
    found.hear(ONE.origin, told(b"3", free=b"25"), 0.0)
    found.tidy(2.9)
    assert standing.elsewhere == {ONE.origin: 3}
    found.tidy(3.1)
    assert not standing.elsewhere
    assert standing.headroom == {ONE.origin: 0.25}
    found.know([OTHER.origin])
    assert not standing.headroom


@pytest.mark.parametrize(
    "headers",
    [{}, told(b"many"), told(b"-1"), told(b"1", b""), told(b"9" * 4300), told(b"1", b"9" * 30)],
)
def test_what_is_no_number_is_no_word(headers: dict[bytes, bytes]) -> None:
    found = loads()
    found.hear(ONE.origin, headers, 0.0)
    assert not found.standing(0.0).elsewhere


def test_more_than_all_memory_is_all_of_it() -> None:
    found = loads()
    found.hear(ONE.origin, told(b"1", free=b"999"), 0.0)
    assert found.standing(0.0).headroom == {ONE.origin: 1.0}


def test_a_rest_ends_by_itself() -> None:
    found = loads()
    found.circuits.failed(ONE, "bad", 0.0)
    found.circuits.failed(OTHER, "full", 0.0, pause_s=4.0)
    assert found.standing(0.9).penalised == {ONE.origin, OTHER.origin}
    assert found.standing(1.1).penalised == {OTHER.origin}
    assert not found.standing(4.1).penalised


def test_who_is_published_anew_begins_anew_and_who_is_not_does_not() -> None:
    circuits = loads().circuits
    circuits.know([ONE, OTHER], 0.0)
    circuits.failed(ONE, "gone", 0.0)
    circuits.failed(OTHER, "gone", 0.0)
    again = target("m-0", port=1, version=2)
    circuits.know([again, OTHER], 1.0)
    assert circuits.shunned(1.0) == {OTHER.origin}
    assert circuits.phases(1.0) == {"m-0": 0, "m-1": 2}
    # An answer of before the restart that only now turns out to be broken is held against nobody for long.
    circuits.failed(again, "bad", 1.0)
    assert circuits.shunned(1.5) == {ONE.origin, OTHER.origin}
    assert circuits.shunned(2.1) == {OTHER.origin}
    circuits.know([again], 3.0)
    assert not circuits.shunned(3.0)


def test_one_on_trial_is_shunned_by_all_others() -> None:
    circuits = loads().circuits
    for _ in range(3):
        circuits.failed(ONE, "bad", 0.0)
    assert not circuits.shunned(2.0)
    assert circuits.asked(ONE, 2.0)
    assert circuits.shunned(2.0) == {ONE.origin}
    circuits.left(ONE, 2.1)
    assert not circuits.shunned(2.1)
    assert circuits.asked(ONE, 2.2)
    circuits.succeeded(ONE, 2.2, 2.5)
    assert not circuits.shunned(2.5)
    circuits.tidy(30.0)
    assert circuits.phases(30.0) == {}


def whole(name: str) -> WholeResponse:
    return WholeResponse(target=target(name), status=200, headers=[], body=b"")


async def later(result: WholeResponse | None, turns: int = 1) -> WholeResponse | None:
    for _ in range(turns):
        await asyncio.sleep(0)
    return result


async def never() -> None:
    await asyncio.Event().wait()


async def test_without_a_need_nobody_else_is_asked() -> None:
    def rival() -> None:
        raise AssertionError("nobody is to be asked")

    assert await forwarder.race(later(whole("m-0")), rival, after_s=60.0) == whole("m-0")
    assert await forwarder.race(later(None), rival, after_s=60.0) is None


async def test_whoever_answers_first_wins_and_a_failure_leaves_it_to_the_other() -> None:
    async def raced(
        first: forwarder.AttemptCoroutine, second: forwarder.AttemptCoroutine | None
    ) -> forwarder.AttemptResult:
        return await forwarder.race(first, lambda: second, after_s=0.0)

    assert await raced(never(), later(whole("m-1"))) == whole("m-1")
    assert await raced(later(whole("m-0"), 9), later(None)) == whole("m-0")
    assert await raced(later(None, 9), later(whole("m-1"), 20)) == whole("m-1")
    assert await raced(later(None, 9), later(None)) is None
    assert await raced(later(whole("m-0"), 9), None) == whole("m-0")
