"""Access control: keys, models and rates in values; then over HTTP, and in which order they are checked."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.apis.openai import PATHS as PASSED
from gateway.apis.registry import PATHS as TRANSLATED
from gateway.auth.access_control import AccessControl, requires_keys
from gateway.auth.keyring import Keyring, presented_key
from schemas.wire.errors import RefusedError
from store import keys
from tests.support.clock import FakeClock
from tests.support.gateway_calls import ADMIN, KEYS_REQUIRED, SECRET
from tests.support.gateway_engine_scripts import chat
from tests.support.gateway_fake_engine import Call, FakeEngine
from tests.support.gateway_gate import ONE_SECRET, Gate, bearer
from tests.support.gateway_raw_client import connected, post
from tests.support.gateway_resume_engine import DONE, Marked
from tests.support.gateway_world import Running, deployment, running_gateway
from tests.support.waiting import until, until_async


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
    assert gate.keyring.find(shown) is None or shown == ONE_SECRET.encode()
    with pytest.raises(RefusedError):
        gate.enter([(b"x-api-key", shown)])


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
def test_requires_keys(auth: str, host: str, asks: bool) -> None:
    assert requires_keys(auth, host) is asks


def test_without_keys_it_says_how_to_make_one(gate: Gate) -> None:
    assert (gate.refusal().status, gate.refusal().code) == (503, "not_synced")
    gate.has()
    with pytest.raises(RefusedError) as caught:
        gate.enter([])
    refusal = caught.value.refusal
    assert (refusal.status, refusal.code) == (401, "invalid_api_key")
    assert "the fleet has none yet: `fleetctl create apikey NAME`" in refusal.message
    assert (b"www-authenticate", b'Bearer realm="mlx-fleet"') in refusal.headers()
    assert "no keys yet" in gate.refusal().message
    assert gate.reasons == {"unknown": 2, "no_key": 1, "wrong_key": 1}


async def test_a_key_is_good_until_it_is_revoked_or_expires(gate: Gate) -> None:
    ends = gate.clock.now() + timedelta(seconds=10)
    gate.has(gate.key(), gate.key("two", "short", expires=ends))
    gate.enter(bearer(ONE_SECRET))
    gate.enter(bearer("two"))
    await gate.clock.advance(10)
    assert (gate.refusal("two").status, gate.refusal("two").code) == (401, "api_key_expired")
    gate.has()
    assert gate.refusal().code == "invalid_api_key"


@pytest.mark.parametrize("shown", [ONE_SECRET, f"Basic {ONE_SECRET}", f"Token {ONE_SECRET}"])
def test_a_key_without_its_scheme_is_explained(gate: Gate, shown: str) -> None:
    gate.has(gate.key())
    with pytest.raises(RefusedError, match="does not begin with `Bearer `") as caught:
        gate.enter([(b"authorization", shown.encode())])
    assert caught.value.refusal.status == 401
    assert ONE_SECRET not in caught.value.refusal.message
    assert gate.reasons == {"no_key": 1}


async def test_names_are_for_admins(gate: Gate) -> None:
    ends = gate.clock.now() + timedelta(seconds=10)
    gate.has(gate.key(), gate.key("two", "chief", role="viewer", expires=ends))
    seen = [gate.access.sees_all(headers) for headers in ([], bearer(ONE_SECRET), bearer("two"))]
    assert seen == [False, False, True]
    await gate.clock.advance(10)
    assert not gate.access.sees_all(bearer("two"))
    assert gate.reasons == {}  # a lookup is not a refusal


def test_models_are_those_of_the_key(gate: Gate) -> None:
    gate.has(gate.key(models=("fast", "best")))
    gate.access.allow(gate.enter(bearer(ONE_SECRET)), "fast")
    refusal = gate.refusal(model="secret-model")
    assert (refusal.status, refusal.code, refusal.param) == (403, "model_not_allowed", "model")
    assert refusal.message.endswith("may not use the model 'secret-model'; it may use: best, fast.")


def test_without_required_keys_every_request_is_admitted() -> None:
    clock = FakeClock()
    access = AccessControl(Keyring(clock), clock, is_on=False)
    assert access.identify(bearer("anything")) is None
    assert access.model_limiters(None, "m", None) == ()


@pytest.fixture
async def gateway() -> AsyncIterator[Running]:
    async with running_gateway(limits=KEYS_REQUIRED) as made:
        await made.world.put(deployment("hidden"))
        await made.knows_keys()
        yield made


@pytest.fixture
async def engine(gateway: Running) -> FakeEngine:
    (made,) = await gateway.serve(chat)
    return made


PATHS = (*PASSED, *TRANSLATED)
BY_KEY = {"authorization": f"Bearer {SECRET}"}


async def never(_: Call) -> None:
    await asyncio.Event().wait()


@pytest.mark.usefixtures("engine")
async def test_a_key_opens_and_its_end_closes(gateway: Running) -> None:
    assert (await gateway.chat_with_key())[:2] == (401, "invalid_api_key")
    assert (await gateway.chat_with_key(SECRET))[:2] == (401, "invalid_api_key")
    await gateway.add_key(SECRET)

    assert (await gateway.chat_with_key(SECRET))[0] == 200
    await gateway.world.delete(keys.named(keys.API_KEY_PREFIX, "ci"))

    async def is_closed() -> bool:
        return (await gateway.chat_with_key(SECRET))[0] == 401

    await until_async(is_closed, what="its end")


@pytest.mark.usefixtures("engine")
async def test_what_a_key_is_for_and_how_often(gateway: Running) -> None:
    await gateway.add_key(SECRET, models=("m", "old"), requests_per_minute=3, tokens_per_minute=500)
    assert (await gateway.chat_with_key(SECRET, "hidden"))[:2] == (403, "model_not_allowed")
    assert (await gateway.chat_with_key(SECRET, "no-such"))[:2] == (403, "model_not_allowed")
    # Neither was charged. A model that the key may use and that does not exist is, and no other's name is told.
    by_key = {"x-api-key": SECRET}
    old = {"model": "old", "messages": []}
    async with gateway.post(json=old, headers=by_key) as answer:
        message = (await answer.json())["error"]["message"]
        assert answer.status == 404
        assert "This fleet serves: m." in message
        assert "hidden" not in message
    status, _, headers = await gateway.chat_with_key(SECRET)
    assert status == 200
    assert headers["x-ratelimit-limit-requests"] == "3"
    assert headers["x-ratelimit-remaining-requests"] == "1"
    assert headers["x-ratelimit-remaining-tokens"] == "500"
    assert (await gateway.chat_with_key(SECRET))[0] == 200
    status, code, headers = await gateway.chat_with_key(SECRET)
    assert (status, code) == (429, "rate_limit_exceeded")
    assert 0 < int(headers["retry-after"]) <= 20
    async with gateway.get("/v1/models", headers=by_key) as answer:
        assert [model["id"] for model in (await answer.json())["data"]] == ["m"]
    async with gateway.get("/v1/models/hidden", headers=by_key) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (403, "model_not_allowed")
    async with gateway.get("/v1/models/m", headers=by_key) as answer:
        assert answer.status == 200
    text = gateway.gateway.metrics.text()
    assert 'fleet_gateway_limited_total{reason="requests"} 1' in text
    assert 'fleet_gateway_key_requests_total{key="ci"} 5' in text


async def test_a_request_is_counted_until_its_client_is_answered_or_gone(
    gateway: Running, engine: FakeEngine
) -> None:
    principal = await gateway.add_key(SECRET, concurrency=1)
    for _ in range(2):
        assert (await gateway.chat_with_key(SECRET))[0] == 200
        await until(lambda: principal.limiter.in_flight == 0, what="its end")
    engine.script = never
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(gateway.chat_with_key(SECRET))
        await until(lambda: principal.limiter.in_flight == 1, what="the request")
        assert (await gateway.chat_with_key(SECRET))[:2] == (429, "rate_limit_exceeded")
        asking.cancel()
    await until(lambda: principal.limiter.in_flight == 0, what="its end")


async def with_usage(call: Call) -> None:
    await call.answer(b'{"usage":{"prompt_tokens":30,"completion_tokens":5,"total_tokens":35}}')


async def test_tokens_of_answers_are_charged(gateway: Running, engine: FakeEngine) -> None:
    principal = await gateway.add_key(SECRET, tokens_per_minute=40)
    engine.script = with_usage
    assert (await gateway.chat_with_key(SECRET))[0] == 200
    await until(lambda: principal.limiter.tokens_used == 35, what="the charge")
    engine.script = Marked()
    body = {"model": "m", "messages": [], "stream": True}
    async with gateway.post(json=body, headers=BY_KEY) as answer:
        assert (answer.status, (await answer.read())[-14:]) == (200, DONE)
    # 11 of the prompt and 8 of the answer, whether or not the client asked for usage.
    await until(lambda: principal.limiter.tokens_used == 35 + 19, what="the charge")
    status, code, got = await gateway.chat_with_key(SECRET)
    assert (status, code) == (429, "rate_limit_exceeded")
    assert int(got["retry-after"]) >= 20


@pytest.mark.usefixtures("engine")
async def test_what_is_open_and_what_is_not(gateway: Running) -> None:
    await gateway.add_key(SECRET)
    for path in ("/", "/health", "/health/live", "/health/ready", "/metrics", "/metrics/demand"):
        async with gateway.get(path) as answer:
            assert answer.status == 200, path
    for path in ("/v1/models", "/v1/models/", "/nowhere", "/api/tags"):
        async with gateway.get(path) as answer:
            assert answer.status == 401, path
    async with gateway.get("/nowhere", headers={"api-key": SECRET}) as answer:
        assert answer.status == 404


async def test_a_key_goes_nowhere(
    gateway: Running, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    await gateway.add_key(SECRET)
    assert (await gateway.chat_with_key(SECRET))[0] == 200
    for secret, model in ((SECRET, "no-such"), (SECRET + "x", "m")):
        _, _, headers = await gateway.chat_with_key(secret, model)
        assert SECRET not in str(headers)
    assert engine.calls
    assert all(SECRET not in str(call.headers) for call in engine.calls)
    told = [str(vars(record)) for record in caplog.records if record.name.startswith("gateway")]
    assert not any(SECRET in one for one in told)
    assert SECRET not in gateway.gateway.metrics.text()


@pytest.mark.parametrize("path", PATHS)
async def test_strangers_bodies_are_not_read(gateway: Running, path: str) -> None:
    await gateway.add_key(SECRET)
    for body in (b"{", b"{}", b'{"model": "m", "colour": 1}'):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": SECRET}):
            async with gateway.post(path, data=body, headers=headers) as answer:
                told = await answer.text()
                assert answer.status == 401, told
                assert answer.headers["www-authenticate"].startswith("Bearer")
                assert ("begin with `Bearer `" in told) == (headers == {"authorization": SECRET})
    # Strangers cannot push out the journal's history, but are counted.
    assert gateway.gateway.recorder.journal.last(9) == []
    text = gateway.gateway.metrics.text()
    assert 'fleet_gateway_requests_total{model="unknown",outcome="refused"} 9' in text
    assert 'fleet_gateway_limited_total{reason="wrong_key"} 3' in text


@pytest.mark.parametrize("path", PATHS)
async def test_a_stranger_is_refused_before_the_body_arrives(gateway: Running, path: str) -> None:
    await gateway.add_key(SECRET)
    for expect in ((), ("expect: 100-continue",)):
        async with connected(gateway.url) as client:
            await client.send(post(b"x" * 1000, *expect, path=path)[:-1000])
            answer = await client.answer()
            assert (answer.status, answer.headers["connection"]) == (401, "close")
            assert await client.is_closed()


async def test_a_strangers_request_behind_another_is_refused_in_its_turn(
    gateway: Running, engine: FakeEngine
) -> None:
    await gateway.add_key(SECRET)
    async with connected(gateway.url) as client:
        good = post(b'{"model":"m"}', f"authorization: Bearer {SECRET}")
        await client.send(good + post(b"x" * 1000)[:-1])
        assert [(await client.answer()).status for _ in range(2)] == [200, 401]
        assert await client.is_closed()
    assert len(engine.calls) == 1


@pytest.mark.parametrize("path", PATHS)
async def test_bad_bodies_are_under_the_rate(gateway: Running, path: str) -> None:
    limit = "x-ratelimit-limit-requests"
    if path.startswith("/v1/messages"):
        limit = "anthropic-ratelimit-requests-limit"
    principal = await gateway.add_key(SECRET, requests_per_minute=2, concurrency=1)
    statuses = []
    for _ in range(3):
        async with gateway.post(path, data=b"{", headers=BY_KEY) as answer:
            statuses.append(answer.status)
            assert answer.headers[limit] == "2"
    assert statuses == [400, 400, 429]
    assert principal.limiter.in_flight == 0


@pytest.mark.usefixtures("engine")
async def test_health_names_models_to_admins_alone(gateway: Running) -> None:
    await gateway.add_key(SECRET)
    await gateway.add_key(ADMIN, "me", role="viewer")
    found: list[Any] = []
    for headers in ({}, BY_KEY, {"authorization": f"Bearer {ADMIN}"}):
        async with gateway.get("/health", headers=headers) as answer:
            told = await answer.json()
            assert (answer.status, told["modelsKnown"], told["modelsReady"]) == (200, 2, 1)
            found.append(told.get("models"))
    assert found[:2] == [None, None]
    assert {name: one["ready"] for name, one in found[2].items()} == {"hidden": 0, "m": 1}


@pytest.mark.parametrize("path", [*PATHS, "/api/show"])
async def test_compressed_bodies_are_refused_in_words(
    gateway: Running, engine: FakeEngine, path: str
) -> None:
    await gateway.add_key(SECRET)
    for coding in ("gzip", "br, gzip"):
        headers = {**BY_KEY, "content-encoding": coding}
        async with gateway.post(path, data=b"\x1f\x8b", headers=headers) as answer:
            told = await answer.text()
            assert answer.status == 415
            assert f"content-encoding: {coding}" in told
            assert "send it uncompressed" in told
    assert not engine.calls
    headers = {**BY_KEY, "content-encoding": "identity"}
    async with gateway.post(path, data=b"{", headers=headers) as answer:
        assert answer.status == 400
