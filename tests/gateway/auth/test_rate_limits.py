"""Token buckets, whose admission over any time is bounded; clients without a key; models; headers."""

import math
import sys

from hypothesis import given
from hypothesis import strategies as st

from gateway.auth.rate_limits import (
    AnonymousClients,
    Limits,
    ModelRates,
    RateLimiter,
    TokenBucket,
    anthropic_headers,
    rates_of,
)
from gateway.routing.table import ServedModel
from schemas.routing import RateLimit, Routing
from tests.support.clock import FakeClock

rates = st.floats(min_value=0.1, max_value=1e6)
steps = st.lists(st.tuples(st.floats(0, 120), st.floats(0, 5_000)), max_size=40)


@given(rates, st.lists(st.floats(0, 30), max_size=60))
def test_requests_over_any_time_are_bounded(per_minute: float, pauses: list[float]) -> None:
    bucket, now_s, taken = TokenBucket(per_minute, 0.0), 0.0, 0
    for pause_s in pauses:
        now_s += pause_s
        while bucket.level(now_s) >= 1 and taken < 1_000:
            bucket.take(1)
            taken += 1
    assert taken <= max(1.0, per_minute) + per_minute / 60 * now_s + 1e-6


@given(rates, steps)
def test_debts_are_paid_back(per_minute: float, asked: list[tuple[float, float]]) -> None:
    """Requests admitted before their cost is known get no more than the rate and one debt."""
    bucket, now_s, charged, largest = TokenBucket(per_minute, 0.0), 0.0, 0.0, 0.0
    for pause_s, tokens in asked:
        now_s += pause_s
        if bucket.level(now_s) > 0:
            bucket.take(tokens)
            charged, largest = charged + tokens, max(largest, tokens)
    bound = max(1.0, per_minute) + per_minute / 60 * now_s + largest
    assert charged <= bound * (1 + 1e-9) + 1e-6


@given(rates, st.floats(0, 1e6), st.floats(1, 100))
def test_the_reported_wait_is_long_enough(per_minute: float, taken: float, wanted: float) -> None:
    bucket = TokenBucket(per_minute, 0.0)
    wanted = min(wanted, bucket.capacity)
    bucket.take(taken)
    wait_s = bucket.wait_s(wanted)
    assert math.isfinite(wait_s)
    assert bucket.level(wait_s) >= wanted * (1 - 1e-6) - 1e-6


@given(rates, rates, st.floats(0, 1e6))
def test_another_rate_forgives_no_debt_and_gives_nothing(
    before: float, after: float, taken: float
) -> None:
    bucket = TokenBucket(before, 0.0)
    bucket.take(taken)
    level = bucket.level(0.0)
    bucket.resize(after, 0.0)
    assert bucket.level(0.0) <= min(level, max(1.0, after))


def test_a_clock_that_stands_still_fills_nothing() -> None:
    bucket = TokenBucket(60, 5.0)
    bucket.take(60)
    assert bucket.level(5.0) == 0
    assert bucket.level(4.0) == 0
    assert bucket.level(6.0) == 1
    assert bucket.full_s() == 59


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_all_addresses_of_a_64_are_one_client(one: int, other: int) -> None:
    clients = AnonymousClients(Limits(requests_per_minute=1), FakeClock())
    hosts = [
        f"2001:db8:0:1:{n >> 48:x}:{n >> 32 & 65535:x}:{n >> 16 & 65535:x}:{n & 65535:x}"
        for n in (one, other)
    ]
    assert clients.of(hosts[0]) is clients.of(hosts[1])
    assert len(clients) == 1


async def test_the_table_of_clients_is_bounded_and_forgives_no_debt() -> None:
    clock = FakeClock()
    clients = AnonymousClients(Limits(requests_per_minute=2), clock, max_clients=3)
    debtor = clients.of("10.0.0.1")
    for _ in range(2):
        debtor.enter()
        debtor.leave(0, clock)
    for number in range(2, 50):
        clients.of(f"10.0.0.{number}").enter()
        await clock.advance(0.1)
    assert len(clients) == 3
    assert clients.of("10.0.0.1") is debtor
    # Those that found no room share one entry, which runs out as well.
    shared = clients.of("10.9.9.9")
    assert clients.of("10.9.9.8") is shared
    assert shared.check(clock.monotonic()) is not None
    assert debtor.check(clock.monotonic()) is not None


async def test_clients_that_are_as_good_as_new_make_room() -> None:
    clock = FakeClock()
    clients = AnonymousClients(Limits(requests_per_minute=60), clock, max_clients=2)
    running, done = clients.of("10.0.0.1"), clients.of("10.0.0.2")
    for limiter in (running, done):
        limiter.enter()
    done.leave(0, clock)
    await clock.advance(2)
    clients.of("10.0.0.3")
    assert len(clients) == 2
    assert clients.of("10.0.0.1") is running  # its request is still in progress
    assert clients.of("10.0.0.2") is not done


def test_an_entry_of_a_client_is_small() -> None:
    limits = Limits(requests_per_minute=1, tokens_per_minute=1, concurrency=1)
    made = RateLimiter("The address 10.0.0.1", limits, 0.0)
    parts = (made, made.requests, made.tokens, made.subject)
    assert sum(sys.getsizeof(part) for part in parts) < 1024


def served(name: str, source: str, limit: RateLimit | None) -> ServedModel:
    routing = Routing(rate_limit=limit)
    return ServedModel(
        name=name, created=0, backends=(), reason="", routing=routing, routing_source=source
    )


def test_names_of_one_deployment_share_its_rates_and_gateways_grant_their_share() -> None:
    clock = FakeClock()
    rates = ModelRates(clock)
    limit = RateLimit(requests_per_minute=6)
    model, alias = (
        served("m", "ModelDeployment/m", limit),
        served("fast", "ModelDeployment/m", limit),
    )
    shared = rates.of(model)
    assert shared is not None
    assert rates.of(alias) is shared
    assert rates.of(served("free", "ModelDeployment/free", None)) is None
    for _ in range(4):
        shared.enter()
    rates.share(3)
    assert shared.requests is not None
    assert (shared.requests.capacity, shared.requests.level(0.0)) == (2, 2)
    changed = rates.of(served("m", "ModelDeployment/m", RateLimit(requests_per_minute=30)))
    assert changed is shared  # what was used stays used
    assert (shared.requests.capacity, shared.requests.level(0.0)) == (10, 2)
    rates.update({})
    assert rates.of(model) is not shared


def test_anthropics_headers_have_times() -> None:
    clock = FakeClock()
    limiter = RateLimiter("x", Limits(requests_per_minute=60, tokens_per_minute=600), 0.0)
    limiter.enter()
    limiter.leave(900, clock)
    assert dict(anthropic_headers(rates_of([limiter], clock))) == {
        b"anthropic-ratelimit-requests-limit": b"60",
        b"anthropic-ratelimit-requests-remaining": b"59",
        b"anthropic-ratelimit-requests-reset": b"2026-01-01T00:00:01Z",
        b"anthropic-ratelimit-tokens-limit": b"600",
        b"anthropic-ratelimit-tokens-remaining": b"0",
        b"anthropic-ratelimit-tokens-reset": b"2026-01-01T00:01:30Z",
    }
