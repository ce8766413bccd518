"""The schedule of health checks: silent endpoints only, the most urgent first, at a limited rate."""

from collections.abc import Awaitable
from dataclasses import replace
from itertools import pairwise

from gateway.forwarding.health_checks import (
    MOST_EJECTED_INTERVAL_S,
    RATE_PER_S,
    TICK_S,
    ProbeSchedule,
)
from gateway.routing.table import CheckPolicy, EngineEndpoint
from schemas.wire.engine_address import EngineAddress
from store import keys
from tests.support.gateway_calls import with_routing
from tests.support.gateway_engine_scripts import chat
from tests.support.gateway_world import Running, target
from tests.support.waiting import until_async

NOBODY: frozenset[EngineAddress] = frozenset()


def fleet(count: int) -> list[EngineEndpoint]:
    return [target(f"m-{number}", port=number + 1) for number in range(count)]


def asked(
    rounds: ProbeSchedule,
    now_s: float,
    awaited: frozenset[EngineAddress] = NOBODY,
    ejected: frozenset[EngineAddress] = NOBODY,
) -> list[str]:
    due = rounds.due(now_s, awaited=awaited, is_open=ejected.__contains__, draw=lambda: 0.5)
    return [endpoint.replica for endpoint in due]


def test_answering_endpoints_are_not_checked() -> None:
    rounds, (endpoint, other) = ProbeSchedule(), fleet(2)
    rounds.set_endpoints((endpoint, other), 0.0)
    for second in range(30):
        rounds.record_heard({endpoint.origin}, float(second))
        found = asked(rounds, float(second))
        assert found == (["m-1"] if second in (10, 20) else [])
        if found:
            rounds.done(other.origin)


def test_a_deployment_says_after_which_silence_it_is_checked() -> None:
    usual, other = fleet(2)
    often = replace(other, checks=CheckPolicy(interval_s=2.0))
    rounds = ProbeSchedule()
    rounds.set_endpoints((usual, often), 0.0)
    assert asked(rounds, 1.5) == []
    assert asked(rounds, 2.0) == ["m-1"]
    rounds.done(often.origin)
    # The declaration changes, and with it no endpoint starts anew.
    rounds.set_endpoints((usual, other), 3.0)
    assert asked(rounds, 9.5) == []
    assert asked(rounds, 10.0) == ["m-0"]


def test_a_running_check_is_not_repeated() -> None:
    rounds, (endpoint,) = ProbeSchedule(), fleet(1)
    rounds.set_endpoints((endpoint,), 0.0)
    assert asked(rounds, 10.0) == ["m-0"]
    assert asked(rounds, 60.0) == []
    rounds.done(endpoint.origin)
    assert asked(rounds, 60.0) == ["m-0"]


def test_awaited_and_ejected_endpoints_are_checked_first() -> None:
    rounds, endpoints = ProbeSchedule(), fleet(40)
    rounds.set_endpoints(endpoints, 0.0)
    awaited, ejected = frozenset({endpoints[30].origin}), frozenset({endpoints[31].origin})
    assert asked(rounds, 0.5, awaited, ejected) == ["m-31"]
    assert asked(rounds, 1.0, awaited, ejected) == ["m-30"]
    rounds.done(endpoints[30].origin)
    rounds.done(endpoints[31].origin)
    assert asked(rounds, 1.5, awaited, ejected) == ["m-31"]
    assert asked(rounds, 11.0, awaited, ejected)[0] == "m-30"


def test_an_ejected_endpoint_is_checked_less_and_less_often() -> None:
    rounds, (endpoint,) = ProbeSchedule(), fleet(1)
    rounds.set_endpoints((endpoint,), 0.0)
    ejected, times = frozenset({endpoint.origin}), list[float]()
    for tick in range(int(600 / TICK_S)):
        if asked(rounds, tick * TICK_S, ejected=ejected):
            times.append(tick * TICK_S)
            rounds.done(endpoint.origin)
    pauses = [later - sooner for sooner, later in pairwise(times)]
    assert set(pauses[:8]) == {TICK_S}, "a restart is noticed at once"
    assert pauses == sorted(pauses)
    assert pauses[-1] == MOST_EJECTED_INTERVAL_S
    # After it was well again it starts anew.
    asked(rounds, 601.0)
    rounds.done(endpoint.origin)
    assert asked(rounds, 602.0, ejected=ejected) == ["m-0"]
    rounds.done(endpoint.origin)
    assert asked(rounds, 602.5, ejected=ejected) == ["m-0"]


def test_a_thousand_endpoints_are_checked_in_turn_at_the_same_rate() -> None:
    rounds, endpoints = ProbeSchedule(), fleet(1000)
    rounds.set_endpoints(endpoints, 0.0)
    found: list[str] = []
    ticks = int(1000 / (RATE_PER_S * TICK_S))
    for tick in range(ticks):
        now = asked(rounds, 10.0 + tick * TICK_S)
        assert len(now) <= RATE_PER_S * TICK_S
        found += now
        for replica in now:
            rounds.done(endpoints[int(replica.removeprefix("m-"))].origin)
    assert sorted(found) == sorted(endpoint.replica for endpoint in endpoints)


def test_missing_endpoints_are_dropped_and_others_keep_their_times() -> None:
    rounds, (endpoint, other) = ProbeSchedule(), fleet(2)
    rounds.set_endpoints((endpoint, other), 0.0)
    rounds.record_heard({endpoint.origin}, 5.0)
    rounds.set_endpoints((endpoint,), 6.0)
    assert rounds.heard_since(endpoint.origin, 4.0)
    assert not rounds.heard_since(endpoint.origin, 5.0)
    assert not rounds.heard_since(other.origin, 0.0)
    assert asked(rounds, 15.0) == ["m-0"]


async def test_a_withdrawn_engine_that_is_gone_is_no_candidate(gateway: Running) -> None:
    """After an undo nothing asks the ended replicas: the check finds out that nobody listens there."""
    _, gone = await gateway.serve(chat, chat, of=with_routing("m", healthCheck={"interval": "1s"}))
    await gone.kill()
    await gateway.world.delete(keys.endpoint_key("mac-1", gone.replica))

    async def candidates() -> list[str]:
        async with gateway.get("/api/requests/candidates?model=m") as response:
            (backend,) = (await response.json())["backends"]
        return [candidate["replica"] for candidate in backend["candidates"]]

    await gateway.knows("m", ready=1)
    await until_async(
        lambda: _equals(candidates(), ["m-0"]), limit_s=60, what="the end of the candidate"
    )


async def _equals(names: Awaitable[list[str]], expected: list[str]) -> bool:
    return await names == expected
