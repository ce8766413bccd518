"""API keys at a gateway that listens: what clients are told, what they see, and how fast a key ends."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import aiohttp
import anthropic
import openai
import pytest
from multidict import CIMultiDictProxy

from gateway.server import GatewayLimits
from machinery.clock import SystemClock
from schemas.records import ApiKey
from store import codec, keys
from store.memory import MemoryTransport
from store.port import Put
from tests.gateway.fake_engine import Call, FakeEngine, running
from tests.gateway.marked import DONE, Marked
from tests.gateway.scripts import chat
from tests.gateway.world import Running, World, deployment, running_gateway
from tests.support.waiting import until, until_async

SECRET, ADMIN = "sk-fleet-abc", "sk-fleet-admin"
CLOSED = GatewayLimits(drain_timeout_s=0.0, asks_for_keys=True)


async def give(world: World, secret: str, name: str = "ci", **more: object) -> None:
    hash_ = hashlib.sha256(secret.encode()).hexdigest()
    key = ApiKey(name=name, hash=hash_, created=datetime(2026, 1, 1, tzinfo=UTC), **more)  # type: ignore[arg-type]  # any field
    put = Put(key=keys.named(keys.API_KEY_PREFIX, name), value=codec.encode(key))
    await world.transport.commit([], [put])


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with running(FakeEngine("m-0", chat)) as made:
        yield made


@pytest.fixture
async def world(engine: FakeEngine) -> World:
    world = World(MemoryTransport(SystemClock()))
    await world.serve("m", engine)
    await world.put(deployment("hidden"))
    return world


@pytest.fixture
async def gateway(world: World) -> AsyncIterator[Running]:
    async with running_gateway(world.transport, CLOSED) as made:
        await made.knows("m", ready=1)
        await until(lambda: made.gateway.known.keyring.is_known, what="the keys")
        yield made


async def ask(
    http: aiohttp.ClientSession, gateway: Running, secret: str = "", model: str = "m"
) -> tuple[int, str, CIMultiDictProxy[str]]:
    """Return status, code and headers."""
    headers = {"authorization": f"Bearer {secret}"} if secret else {}
    url = f"{gateway.url}/v1/chat/completions"
    async with http.post(url, json={"model": model, "messages": []}, headers=headers) as answer:
        error = (await answer.json()).get("error", {})
        return answer.status, error.get("code", ""), answer.headers


async def never(_: Call) -> None:
    await asyncio.Event().wait()


async def test_a_key_opens_and_its_end_closes(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    assert (await ask(http, gateway))[:2] == (401, "invalid_api_key")
    assert (await ask(http, gateway, SECRET))[:2] == (401, "invalid_api_key")
    await give(world, SECRET)

    async def opened() -> bool:
        return (await ask(http, gateway, SECRET))[0] == 200

    async def closed() -> bool:
        return (await ask(http, gateway, SECRET))[0] == 401

    await until_async(opened, what="the key")
    await world.delete(keys.named(keys.API_KEY_PREFIX, "ci"))
    # Everybody waits for the same watch: within a turn of the loop, and in a fleet within milliseconds.
    await until_async(closed, limit_s=1.0, what="its end")


async def test_what_a_key_is_for_and_how_often(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    await give(world, SECRET, models=("m", "old"), requests_per_minute=4, tokens_per_minute=500)
    await until(lambda: bool(gateway.gateway.known.keyring), what="the key")
    assert (await ask(http, gateway, SECRET, "hidden"))[:2] == (403, "model_not_allowed")
    assert (await ask(http, gateway, SECRET, "no-such"))[:2] == (403, "model_not_allowed")
    # Those two count as well: a rate is for all that a key asks.
    status, _, headers = await ask(http, gateway, SECRET)
    assert status == 200
    assert headers["x-ratelimit-limit-requests"] == "4"
    assert headers["x-ratelimit-remaining-requests"] == "1"
    assert headers["x-ratelimit-remaining-tokens"] == "500"
    assert (await ask(http, gateway, SECRET))[0] == 200
    status, code, headers = await ask(http, gateway, SECRET)
    assert (status, code) == (429, "rate_limit_exceeded")
    assert 0 < int(headers["retry-after"]) <= 15
    by_key = {"x-api-key": SECRET}
    async with http.get(f"{gateway.url}/v1/models", headers=by_key) as answer:
        assert [model["id"] for model in (await answer.json())["data"]] == ["m"]
    async with http.get(f"{gateway.url}/v1/models/hidden", headers=by_key) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (403, "model_not_allowed")
    async with http.get(f"{gateway.url}/v1/models/m", headers=by_key) as answer:
        assert answer.status == 200
    text = gateway.gateway.metrics.text()
    assert 'fleet_gateway_limited_total{reason="requests"} 1' in text
    assert 'fleet_gateway_key_requests_total{key="ci"} 4' in text


async def test_a_request_is_counted_until_its_client_is_answered_or_gone(
    world: World, gateway: Running, engine: FakeEngine, http: aiohttp.ClientSession
) -> None:
    await give(world, SECRET, concurrency=1)
    await until(lambda: bool(gateway.gateway.known.keyring), what="the key")
    holder = gateway.gateway.known.keyring.find(SECRET.encode())
    assert holder is not None
    for _ in range(2):
        assert (await ask(http, gateway, SECRET))[0] == 200
        await until(lambda: holder.in_flight == 0, what="its end")
    engine.script = never
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(ask(http, gateway, SECRET))
        await until(lambda: holder.in_flight == 1, what="the request")
        assert (await ask(http, gateway, SECRET))[:2] == (429, "rate_limit_exceeded")
        asking.cancel()
    await until(lambda: holder.in_flight == 0, what="its end")


async def with_usage(call: Call) -> None:
    await call.answer(b'{"usage":{"prompt_tokens":30,"completion_tokens":5,"total_tokens":35}}')


async def test_tokens_of_answers_are_charged(
    world: World, gateway: Running, engine: FakeEngine, http: aiohttp.ClientSession
) -> None:
    await give(world, SECRET, tokens_per_minute=40)
    await until(lambda: bool(gateway.gateway.known.keyring), what="the key")
    holder = gateway.gateway.known.keyring.find(SECRET.encode())
    assert holder is not None
    engine.script = with_usage
    assert (await ask(http, gateway, SECRET))[0] == 200
    await until(lambda: holder.tokens_used == 35, what="the charge")
    engine.script = Marked()
    body = {"model": "m", "messages": [], "stream": True}
    headers = {"authorization": f"Bearer {SECRET}"}
    url = f"{gateway.url}/v1/chat/completions"
    async with http.post(url, json=body, headers=headers) as answer:
        assert (answer.status, (await answer.read())[-14:]) == (200, DONE)
    # Eleven of the prompt and eight of the answer, whether or not the client asked to be told.
    await until(lambda: holder.tokens_used == 35 + 19, what="the charge")
    status, code, got = await ask(http, gateway, SECRET)
    assert (status, code) == (429, "rate_limit_exceeded")
    assert int(got["retry-after"]) >= 20


async def test_what_is_open_and_what_is_not(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    await give(world, SECRET)
    await until(lambda: bool(gateway.gateway.known.keyring), what="the key")
    for path in ("/health", "/metrics", "/metrics/demand"):
        async with http.get(f"{gateway.url}{path}") as answer:
            assert answer.status == 200, path
    for path in ("/v1/models", "/nowhere", "/api/tags", "/metrics/", "/health/"):
        async with http.get(f"{gateway.url}{path}") as answer:
            assert answer.status == 401, path
    async with http.get(f"{gateway.url}/nowhere", headers={"api-key": SECRET}) as answer:
        assert answer.status == 404


async def test_the_admin_api_is_for_admins(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    await give(world, SECRET)
    await give(world, ADMIN, "me", is_admin=True)
    await until(lambda: gateway.gateway.known.keyring.find(ADMIN.encode()), what="the keys")
    for path in ("/api/cluster/status", "/api/dashboard/overview", "/queue", "/metrics/snapshot"):
        statuses = []
        for secret in ("", SECRET, ADMIN):
            headers = {"authorization": f"Bearer {secret}"} if secret else {}
            async with http.get(f"{gateway.url}{path}", headers=headers) as answer:
                statuses.append(answer.status)
        assert statuses == [401, 403, 200], path


async def test_official_clients_understand_refusals(world: World, gateway: Running) -> None:
    await give(world, SECRET, models=("old",))
    await until(lambda: bool(gateway.gateway.known.keyring), what="the key")
    messages = [{"role": "user", "content": "hi"}]
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key="wrong", max_retries=0
    ) as client:
        with pytest.raises(openai.AuthenticationError, match="fleetctl get apikeys"):
            await client.chat.completions.create(model="m", messages=messages)  # type: ignore[arg-type]  # plain dicts
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key=SECRET, max_retries=0
    ) as client:
        with pytest.raises(openai.PermissionDeniedError, match="but for: old"):
            await client.chat.completions.create(model="m", messages=messages)  # type: ignore[arg-type]  # plain dicts
    async with anthropic.AsyncAnthropic(
        base_url=gateway.url, api_key="wrong", max_retries=0
    ) as theirs:
        with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
            await theirs.messages.create(model="m", max_tokens=1, messages=messages)  # type: ignore[arg-type]  # plain dicts


async def test_a_key_goes_nowhere(
    world: World,
    gateway: Running,
    engine: FakeEngine,
    http: aiohttp.ClientSession,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG")
    await give(world, SECRET)
    await until(lambda: bool(gateway.gateway.known.keyring), what="the key")
    assert (await ask(http, gateway, SECRET))[0] == 200
    for secret, model in ((SECRET, "no-such"), (SECRET + "x", "m")):
        _, _, headers = await ask(http, gateway, secret, model)
        assert SECRET not in str(headers)
    assert engine.calls
    assert all(SECRET not in str(call.headers) for call in engine.calls)
    told = [str(vars(record)) for record in caplog.records if record.name.startswith("gateway")]
    assert not any(SECRET in one for one in told)
    assert SECRET not in gateway.gateway.metrics.text()
