"""Who is let in: keys, models, rates; in values, without a network."""

import hashlib
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.auth.access_control import AccessControl, requires_keys
from gateway.auth.keyring import Keyring, presented_key
from gateway.errors import Refusal, RefusedError
from schemas.records import ApiKey
from tests.support.clock import FakeClock

SECRET = "sk-fleet-one"


class Gate:
    """A door, with whatever keys a test hands out."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.keyring = Keyring(self.clock)
        self.access = AccessControl(self.keyring, self.clock, is_on=True)
        self.reasons: list[str] = []
        self.access.on_refusal(self.reasons.append)

    def key(self, secret: str = SECRET, name: str = "ci", **more: object) -> ApiKey:
        hash_ = hashlib.sha256(secret.encode()).hexdigest()
        return ApiKey(name=name, hash=hash_, created=self.clock.now(), **more)  # type: ignore[arg-type]  # any field

    def has(self, *keys: ApiKey, gateways: int = 1) -> None:
        self.keyring.replace({key.name: key for key in keys}, gateways)

    def refusal(self, secret: str = SECRET, model: str = "m") -> Refusal:
        with pytest.raises(RefusedError) as caught:
            self.access.allow(self.access.enter(bearer(secret)), model)
        assert secret not in caught.value.refusal.message
        return caught.value.refusal


def bearer(secret: str) -> list[tuple[bytes, bytes]]:
    return [(b"accept", b"*/*"), (b"authorization", f"Bearer {secret}".encode())]


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ([(b"authorization", b"Bearer k")], b"k"),
        ([(b"authorization", b"bearer  k ")], b"k"),
        ([(b"x-api-key", b"k")], b"k"),
        ([(b"api-key", b"k")], b"k"),
        ([(b"authorization", b"Basic a2V5"), (b"x-api-key", b"k")], b"k"),
        ([(b"authorization", b"Bearer"), (b"x-api-key", b"k")], b"k"),
        ([(b"x-api-key", b""), (b"api-key", b"k")], b"k"),
        ([(b"x-api-key", b"k"), (b"authorization", b"Bearer other")], b"k"),
        ([(b"authorization", b"Basic k")], b""),
        ([(b"cookie", b"Bearer k")], b""),
        ([], b""),
    ],
)
def test_where_a_key_is_shown(headers: list[tuple[bytes, bytes]], key: bytes) -> None:
    assert presented_key(headers) == key


@given(st.binary(max_size=80))
def test_no_other_bytes_are_a_key(shown: bytes) -> None:
    gate = Gate()
    gate.has(gate.key())
    assert gate.keyring.find(shown) is None or shown == SECRET.encode()
    with pytest.raises(RefusedError):
        gate.access.enter([(b"x-api-key", shown)])


@pytest.mark.parametrize(
    ("auth", "host", "asks"),
    [
        ("auto", "127.0.0.1", False),
        ("auto", "::1", False),
        ("auto", "0.0.0.0", True),
        ("auto", "::", True),
        ("auto", "10.0.0.5", True),
        ("on", "127.0.0.1", True),
        ("off", "0.0.0.0", False),
    ],
)
def test_who_is_asked_for_a_key(auth: str, host: str, asks: bool) -> None:
    assert requires_keys(auth, host) is asks


def test_without_keys_it_says_how_to_make_one(gate: Gate) -> None:
    assert (gate.refusal().status, gate.refusal().code) == (503, "not_synced")
    gate.has()
    with pytest.raises(RefusedError) as caught:
        gate.access.enter([])
    refusal = caught.value.refusal
    assert (refusal.status, refusal.code) == (401, "invalid_api_key")
    assert "the fleet has none yet: `fleetctl create apikey NAME`" in refusal.message
    assert (b"www-authenticate", b'Bearer realm="mlx-fleet"') in refusal.headers()
    assert "no keys at all yet" in gate.refusal().message
    assert gate.reasons == ["unknown", "unknown", "no_key", "wrong_key"]


async def test_a_key_is_good_until_it_is_revoked_or_expires(gate: Gate) -> None:
    ends = gate.clock.now() + timedelta(seconds=10)
    gate.has(gate.key(), gate.key("two", "short", expires=ends))
    assert gate.access.enter(bearer(SECRET)) is not None
    assert gate.access.enter(bearer("two")) is not None
    await gate.clock.advance(10)
    assert (gate.refusal("two").status, gate.refusal("two").code) == (401, "api_key_expired")
    gate.has()
    assert gate.refusal().code == "invalid_api_key"


@pytest.mark.parametrize("shown", [SECRET, f"Basic {SECRET}", f"Token {SECRET}"])
def test_a_key_without_its_word_is_told_so(gate: Gate, shown: str) -> None:
    gate.has(gate.key())
    with pytest.raises(RefusedError, match="does not begin with `Bearer `") as caught:
        gate.access.enter([(b"authorization", shown.encode())])
    assert caught.value.refusal.status == 401
    assert SECRET not in caught.value.refusal.message
    assert gate.reasons == ["no_key"]


async def test_names_are_for_admins(gate: Gate) -> None:
    ends = gate.clock.now() + timedelta(seconds=10)
    gate.has(gate.key(), gate.key("two", "chief", is_admin=True, expires=ends))
    seen = [gate.access.sees_all(headers) for headers in ([], bearer(SECRET), bearer("two"))]
    assert seen == [False, False, True]
    await gate.clock.advance(10)
    assert not gate.access.sees_all(bearer("two"))
    assert gate.reasons == []  # who looks is not refused


def test_models_are_those_of_the_key(gate: Gate) -> None:
    gate.has(gate.key(models=("fast", "best")))
    gate.access.allow(gate.access.enter(bearer(SECRET)), "fast")
    refusal = gate.refusal(model="secret-model")
    assert (refusal.status, refusal.code, refusal.param) == (403, "model_not_allowed", "model")
    assert refusal.message.endswith("not for the model 'secret-model', but for: best, fast.")


async def test_requests_run_out_and_come_back(gate: Gate) -> None:
    gate.has(gate.key(requests_per_minute=3))
    for left in (2, 1, 0):
        holder = gate.access.enter(bearer(SECRET))
        assert dict(gate.access.headers(holder)) == {
            b"x-ratelimit-limit-requests": b"3",
            b"x-ratelimit-remaining-requests": b"%d" % left,
            b"x-ratelimit-reset-requests": b"%ds" % (20 * (3 - left)),
        }
    refusal = gate.refusal()
    assert (refusal.status, refusal.type, refusal.code) == (
        429,
        "rate_limit_error",
        "rate_limit_exceeded",
    )
    assert dict(refusal.headers())[b"retry-after"] == b"20"
    assert dict(refusal.headers())[b"x-ratelimit-remaining-requests"] == b"0"
    await gate.clock.advance(20)
    assert gate.access.enter(bearer(SECRET)) is not None
    assert gate.refusal().status == 429


async def test_tokens_are_charged_afterwards_and_debts_are_waited_for(gate: Gate) -> None:
    gate.has(gate.key(tokens_per_minute=600))
    holder = gate.access.enter(bearer(SECRET))
    assert holder is not None
    gate.access.leave(holder, 900)
    refusal = gate.refusal()
    # 300 in debt at 10 a second, and one more.
    assert (refusal.status, refusal.retry_after_s) == (429, 31)
    assert "tokens" in refusal.message
    await gate.clock.advance(31)
    assert gate.access.enter(bearer(SECRET)) is holder
    assert (holder.in_flight, holder.requests_used, holder.tokens_used) == (1, 2, 900)


def test_so_many_at_once(gate: Gate) -> None:
    gate.has(gate.key(concurrency=2))
    first = gate.access.enter(bearer(SECRET))
    assert first is not None
    assert gate.access.enter(bearer(SECRET)) is first
    assert (gate.refusal().status, gate.refusal().retry_after_s) == (429, 1)
    gate.access.leave(first, 0)
    assert gate.access.enter(bearer(SECRET)) is first


def test_what_was_used_stays_used_when_a_key_is_edited_and_not_when_it_is_made_anew(
    gate: Gate,
) -> None:
    gate.has(gate.key(requests_per_minute=2))
    for _ in range(2):
        assert gate.access.enter(bearer(SECRET)) is not None
    gate.has(gate.key(requests_per_minute=2, models=("m",)))
    assert gate.refusal().status == 429
    gate.has()
    gate.has(gate.key(requests_per_minute=2))
    assert gate.access.enter(bearer(SECRET)) is not None


def test_gateways_share_a_keys_rates(gate: Gate) -> None:
    gate.has(gate.key(requests_per_minute=6), gateways=3)
    for _ in range(2):
        assert gate.access.enter(bearer(SECRET)) is not None
    assert "at this gateway 2 per minute" in gate.refusal().message
    gate.has(gate.key("two", "small", requests_per_minute=1), gateways=3)
    assert gate.access.enter(bearer("two")) is not None
    # A third of one a minute is one in three minutes, and not none.
    assert gate.refusal("two").retry_after_s == 180


def test_whoever_asks_for_no_keys_lets_everybody_in() -> None:
    clock = FakeClock()
    access = AccessControl(Keyring(clock), clock, is_on=False)
    assert access.enter(bearer("anything")) is None
    assert access.headers(None) == ()


def test_figures_name_keys_and_show_none(gate: Gate) -> None:
    gate.has(gate.key(), gate.key("two", "b"))
    holder = gate.access.enter(bearer(SECRET))
    assert holder is not None
    gate.access.leave(holder, 7)
    text = "\n".join(gate.keyring.lines())
    assert 'fleet_gateway_key_requests_total{key="ci"} 1' in text
    assert 'fleet_gateway_key_tokens_total{key="ci"} 7' in text
    assert 'fleet_gateway_key_in_flight{key="b"} 0' in text
    assert "sk-fleet" not in text
