"""The keyring: secrets of a key, and the limits that they share."""

import hashlib
from datetime import datetime, timedelta

import pytest

from gateway.auth.rate_limits import openai_headers
from schemas.records import ApiKey, ModelLimits, PreviousSecret
from schemas.wire.errors import RefusedError
from tests.support.gateway_gate import ONE_SECRET, Gate, bearer


@pytest.fixture
def gate() -> Gate:
    return Gate()


def with_previous(key: ApiKey, *, secret: str, expires: datetime) -> ApiKey:
    hash_ = hashlib.sha256(secret.encode()).hexdigest()
    return key.model_copy(update={"previous": (PreviousSecret(hash=hash_, expires=expires),)})


async def test_both_secrets_of_a_rotated_key_share_its_limits_until_the_overlap_ends(
    gate: Gate,
) -> None:
    ends = gate.clock.now() + timedelta(seconds=10)
    before = gate.key("old", requests_per_minute=3)
    gate.has(before)
    first = gate.enter(bearer("old"))
    gate.has(with_previous(gate.key("new", requests_per_minute=3), secret="old", expires=ends))
    assert gate.enter(bearer("new")) is first
    assert gate.enter(bearer("old")) is first
    assert gate.refusal("old").status == gate.refusal("new").status == 429
    assert first.previous_used == 2
    await gate.clock.advance(60)
    refusal = gate.refusal("old")
    assert (refusal.status, refusal.code) == (401, "api_key_expired")
    assert "this earlier secret of it ended on 2026-01-01 00:00 UTC" in refusal.message
    gate.enter(bearer("new"))


async def test_a_rotation_without_overlap_ends_the_old_secret_and_forgives_nothing(
    gate: Gate,
) -> None:
    gate.has(gate.key("old", requests_per_minute=1))
    gate.enter(bearer("old"))
    gate.has(gate.key("new", requests_per_minute=1))
    assert gate.refusal("old").status == 401
    assert gate.refusal("new").status == 429


async def test_the_end_of_a_key_ends_its_earlier_secrets_too(gate: Gate) -> None:
    ends = gate.clock.now() + timedelta(seconds=10)
    key = gate.key("new", expires=ends)
    gate.has(with_previous(key, secret="old", expires=ends + timedelta(seconds=60)))
    await gate.clock.advance(10)
    assert gate.refusal("old").message.startswith("The API key 'ci' expired on")


def test_limits_of_a_key_for_a_model_apply_to_that_model_alone(gate: Gate) -> None:
    gate.has(gate.key(model_limits={"m": ModelLimits(requests_per_minute=1, concurrency=2)}))
    principal = gate.enter(bearer(ONE_SECRET))
    (own,) = gate.access.model_limiters(principal, "m", None)
    assert gate.access.model_limiters(principal, "other", None) == ()
    gate.access.admit((own,))
    with pytest.raises(
        RefusedError, match="'ci' has used up the requests for the model 'm' for now"
    ):
        gate.access.admit((own,))
    assert (own.in_flight, own.requests_used) == (1, 1)


def test_a_request_over_one_limit_is_charged_to_none(gate: Gate) -> None:
    limits = {"m": ModelLimits(requests_per_minute=5), "n": ModelLimits(requests_per_minute=1)}
    gate.has(gate.key(model_limits=limits))
    principal = gate.enter(bearer(ONE_SECRET))
    wide, narrow = principal.by_model["m"], principal.by_model["n"]
    gate.access.admit((wide, narrow))
    with pytest.raises(RefusedError):
        gate.access.admit((wide, narrow))
    assert (wide.requests_used, narrow.requests_used) == (1, 1)
    shown = dict(openai_headers(gate.access.rates((wide, narrow))))
    assert shown[b"x-ratelimit-remaining-requests"] == b"0"  # of the limit that is reached next


async def test_requests_run_out_and_come_back(gate: Gate) -> None:
    gate.has(gate.key(requests_per_minute=3))
    principal = gate.keyring.find(ONE_SECRET.encode())
    assert principal is not None
    for left, reset in ((2, b"20s"), (1, b"40s"), (0, b"1m0s")):
        assert gate.enter(bearer(ONE_SECRET)) is principal
        assert gate.headers(principal) == {
            b"x-ratelimit-limit-requests": b"3",
            b"x-ratelimit-remaining-requests": b"%d" % left,
            b"x-ratelimit-reset-requests": reset,
        }
    refusal = gate.refusal()
    assert (refusal.status, refusal.type, refusal.code) == (
        429,
        "rate_limit_error",
        "rate_limit_exceeded",
    )
    assert dict(refusal.headers())[b"retry-after"] == b"20"
    assert gate.headers(principal)[b"x-ratelimit-remaining-requests"] == b"0"
    await gate.clock.advance(20)
    gate.enter(bearer(ONE_SECRET))
    assert gate.refusal().status == 429


async def test_tokens_are_charged_afterwards_and_debts_are_waited_for(gate: Gate) -> None:
    gate.has(gate.key(tokens_per_minute=600))
    principal = gate.enter(bearer(ONE_SECRET))
    principal.limiter.leave(900, gate.clock)
    refusal = gate.refusal()
    # 300 in debt at 10 a second, and one more.
    assert (refusal.status, refusal.retry_after_s) == (429, 31)
    assert "tokens" in refusal.message
    await gate.clock.advance(31)
    assert gate.enter(bearer(ONE_SECRET)) is principal
    limiter = principal.limiter
    assert (limiter.in_flight, limiter.requests_used, limiter.tokens_used) == (1, 2, 900)


def test_so_many_at_once(gate: Gate) -> None:
    gate.has(gate.key(concurrency=2))
    first = gate.enter(bearer(ONE_SECRET))
    assert first is not None
    assert gate.enter(bearer(ONE_SECRET)) is first
    assert (gate.refusal().status, gate.refusal().retry_after_s) == (429, 1)
    first.limiter.leave(0, gate.clock)
    assert gate.enter(bearer(ONE_SECRET)) is first


def test_what_was_used_stays_used_when_a_key_is_edited_and_not_when_it_is_made_anew(
    gate: Gate,
) -> None:
    gate.has(gate.key(requests_per_minute=2))
    for _ in range(2):
        gate.enter(bearer(ONE_SECRET))
    gate.has(gate.key(requests_per_minute=2, models=("m",)))
    assert gate.refusal().status == 429
    gate.has()
    gate.has(gate.key(requests_per_minute=2))
    gate.enter(bearer(ONE_SECRET))


def test_gateways_share_a_keys_rates(gate: Gate) -> None:
    gate.has(gate.key(requests_per_minute=6), gateways=3)
    for _ in range(2):
        gate.enter(bearer(ONE_SECRET))
    assert "at this gateway 2 per minute" in gate.refusal().message
    gate.has(gate.key("two", "small", requests_per_minute=1), gateways=3)
    gate.enter(bearer("two"))
    # A third of one a minute is one in three minutes, and not none.
    assert gate.refusal("two").retry_after_s == 180


def test_figures_name_keys_and_show_none(gate: Gate) -> None:
    gate.has(gate.key(), gate.key("two", "b"))
    principal = gate.enter(bearer(ONE_SECRET))
    principal.limiter.leave(7, gate.clock)
    text = "\n".join(gate.keyring.lines())
    assert 'fleet_gateway_key_requests_total{key="ci"} 1' in text
    assert 'fleet_gateway_key_tokens_total{key="ci"} 7' in text
    assert 'fleet_gateway_key_in_flight{key="b"} 0' in text
    assert "sk-fleet" not in text
