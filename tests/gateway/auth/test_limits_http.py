"""Limits over HTTP: clients without a key, models, and the headers of each API."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.auth.rate_limits import Limits
from gateway.server import GatewayLimits
from gateway.state.persistence import SnapshotFile
from machinery.clock import SystemClock
from schemas.deployment import ModelDeploymentStatus
from schemas.records import GatewayLease, ModelLimits, PreviousSecret
from store import codec, keys
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.memory import MemoryTransport
from store.port import Put
from tests.support.gateway_calls import (
    KEYS_REQUIRED,
    SECRET,
    chat_with_key,
    put_api_key,
    serve_deployment,
    with_routing,
)
from tests.support.gateway_engine_scripts import chat
from tests.support.gateway_fake_engine import Call, FakeEngine, running
from tests.support.gateway_world import Running, World, route, running_gateway
from tests.support.waiting import until


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with running(FakeEngine("m-0", with_usage)) as made:
        yield made


@pytest.fixture
def world() -> World:
    return World(MemoryTransport(SystemClock()))


async def with_usage(call: Call) -> None:
    await call.answer(b'{"usage":{"prompt_tokens":30,"completion_tokens":5,"total_tokens":35}}')


def open_limits(**limits: Any) -> GatewayLimits:
    return GatewayLimits(drain_timeout_s=0.0, anonymous=Limits(**limits))


async def test_requests_without_a_key_are_limited_by_address(
    world: World, engine: FakeEngine, http: aiohttp.ClientSession
) -> None:
    await world.serve("m", engine)
    async with running_gateway(world.transport, open_limits(requests_per_minute=2)) as gateway:
        await gateway.knows("m", ready=1)
        found = [await chat_with_key(http, gateway) for _ in range(3)]
        assert [status for status, _, _ in found] == [200, 200, 429]
        remaining = [headers["x-ratelimit-remaining-requests"] for _, _, headers in found]
        assert remaining == ["1", "0", "0"]
        assert 0 < int(found[2][2]["retry-after"]) <= 30
        # Another address of this machine is another client.
        local = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
        async with aiohttp.ClientSession(connector=local) as other:
            assert (await chat_with_key(other, gateway))[0] == 200
        text = gateway.gateway.metrics.text()
        assert 'fleet_gateway_limited_total{reason="anonymous_requests"} 1' in text
        assert [entry.key for entry in gateway.gateway.recorder.journal.last(1)] == [""]


async def test_tokens_and_concurrency_without_a_key_are_limited(
    world: World, engine: FakeEngine, http: aiohttp.ClientSession
) -> None:
    await world.serve("m", engine)
    limits = open_limits(tokens_per_minute=30, concurrency=1)
    async with running_gateway(world.transport, limits) as gateway:
        await gateway.knows("m", ready=1)
        clients = gateway.gateway.fleet_state.access.anonymous
        assert clients is not None
        client, release = clients.of("127.0.0.1"), asyncio.Event()

        async def wait_then_answer(call: Call) -> None:
            await release.wait()
            await with_usage(call)

        engine.script = wait_then_answer
        async with asyncio.TaskGroup() as group:
            first = group.create_task(chat_with_key(http, gateway))
            await until(lambda: client.in_flight == 1, what="the request")
            status, code, _ = await chat_with_key(http, gateway)
            assert (status, code) == (429, "rate_limit_exceeded")
            release.set()
        assert first.result()[0] == 200
        await until(lambda: client.tokens_used == 35, what="the charge")
        status, _, headers = await chat_with_key(http, gateway)
        assert (status, headers["x-ratelimit-remaining-tokens"]) == (429, "0")
        assert int(headers["retry-after"]) > 5


async def test_a_key_that_is_shown_holds_where_none_is_required(
    world: World, engine: FakeEngine, http: aiohttp.ClientSession
) -> None:
    await world.serve("m", engine)
    await world.put(route("r", "routed", m=1))
    await put_api_key(world, SECRET, models=("m",), requests_per_minute=1)
    async with running_gateway(world.transport, GatewayLimits(drain_timeout_s=0.0)) as gateway:
        await gateway.knows("routed", ready=1)
        await until(lambda: bool(gateway.gateway.fleet_state.keyring), what="the key")
        for secret, model, status in (
            (SECRET, "routed", 403),
            (SECRET, "m", 200),
            (SECRET, "m", 429),
            ("", "m", 200),
            # Programs for local servers send such keys.
            ("ollama", "routed", 200),
            ("sk-no-key-required", "m", 200),
            ("sk-fleet-wrong", "m", 401),
        ):
            assert (await chat_with_key(http, gateway, secret, model))[0] == status, secret
        for secret, names in ((SECRET, ["m"]), ("ollama", ["m", "routed"])):
            headers = {"authorization": f"Bearer {secret}"}
            async with http.get(f"{gateway.url}/v1/models", headers=headers) as answer:
                assert [one["id"] for one in (await answer.json())["data"]] == names
            async with http.get(f"{gateway.url}/", headers=headers) as answer:
                assert ("models" in await answer.json()) == (secret != SECRET)


async def test_all_gateways_share_the_rate_of_a_key(
    world: World, engine: FakeEngine, http: aiohttp.ClientSession
) -> None:
    await world.serve("m", engine)
    await put_api_key(world, SECRET, requests_per_minute=4)
    async with (
        running_gateway(world.transport, KEYS_REQUIRED) as one,
        running_gateway(world.transport, GatewayLimits(drain_timeout_s=0.0)) as other,
    ):
        for gateway in (one, other):
            state = gateway.gateway.fleet_state
            await gateway.knows("m", ready=1)
            await until(lambda: state.gateways.all() == 2 and state.keyring, what="both")  # noqa: B023
        for gateway in (one, other):
            found = [await chat_with_key(http, gateway, SECRET) for _ in range(3)]
            assert [status for status, _, _ in found] == [200, 200, 429]
        async with http.post(
            f"{one.url}/v1/chat/completions",
            json={"model": "m", "messages": []},
            headers={"authorization": f"Bearer {SECRET}"},
        ) as answer:
            message = (await answer.json())["error"]["message"]
            assert "at this gateway 2 per minute" in message


async def test_all_callers_of_a_deployment_share_its_rate(
    world: World, engine: FakeEngine, http: aiohttp.ClientSession
) -> None:
    declared = with_routing("m", rateLimit={"requestsPerMinute": 3})
    spec = declared.spec.model_copy(update={"served_names": ("fast",)})
    await put_api_key(world, SECRET)
    await put_api_key(world, "sk-fleet-2", "two")
    async with running_gateway(world.transport, KEYS_REQUIRED) as gateway:
        await serve_deployment(world, gateway, declared.model_copy(update={"spec": spec}), engine)
        await world.put(route("r", "routed", m=1))
        await gateway.knows("routed", ready=1)
        found = [
            await chat_with_key(http, gateway, secret, name)
            for secret, name in (
                (SECRET, "m"),
                ("sk-fleet-2", "fast"),
                (SECRET, "routed"),
                ("sk-fleet-2", "m"),
            )
        ]
        assert [status for status, _, _ in found] == [200, 200, 200, 429]
        assert found[3][2]["x-ratelimit-remaining-requests"] == "0"
        assert found[3][2]["retry-after"] == "20"
        text = gateway.gateway.metrics.text()
        assert 'fleet_gateway_limited_total{reason="model_requests"} 1' in text


async def test_a_refused_request_holds_no_slot_of_its_key(
    world: World, engine: FakeEngine, http: aiohttp.ClientSession
) -> None:
    await world.serve("m", engine)
    limits = {"m": ModelLimits(requests_per_minute=1)}
    await put_api_key(world, SECRET, concurrency=5, model_limits=limits)
    async with running_gateway(world.transport, KEYS_REQUIRED) as gateway:
        await gateway.knows("m", ready=1)
        await until(lambda: bool(gateway.gateway.fleet_state.keyring), what="the key")
        assert [(await chat_with_key(http, gateway, SECRET))[0] for _ in range(3)] == [
            200,
            429,
            429,
        ]
        principal = gateway.gateway.fleet_state.keyring.find(SECRET.encode())
        assert principal is not None
        await until(lambda: principal.limiter.in_flight == 0, what="the end of all requests")
        assert principal.limiter.requests_used == 3
        assert principal.by_model["m"].requests_used == 1


async def test_a_rotated_key_opens_with_both_secrets_until_the_overlap_is_ended(
    world: World, engine: FakeEngine, http: aiohttp.ClientSession
) -> None:
    await world.serve("m", engine)
    await put_api_key(world, "sk-fleet-old", requests_per_minute=4)
    async with running_gateway(world.transport, KEYS_REQUIRED) as gateway:
        await gateway.knows("m", ready=1)
        keyring = gateway.gateway.fleet_state.keyring
        await until(lambda: bool(keyring), what="the key")
        assert (await chat_with_key(http, gateway, "sk-fleet-old"))[0] == 200
        hash_ = hashlib.sha256(b"sk-fleet-old").hexdigest()
        earlier = PreviousSecret(hash=hash_, expires=SystemClock().now() + timedelta(hours=1))
        await put_api_key(world, "sk-fleet-new", requests_per_minute=4, previous=(earlier,))
        await until(lambda: keyring.find(b"sk-fleet-new"), what="the new secret")
        for secret, left in (("sk-fleet-new", "2"), ("sk-fleet-old", "1")):
            status, _, headers = await chat_with_key(http, gateway, secret)
            assert (status, headers["x-ratelimit-remaining-requests"]) == (200, left)
        metric = 'fleet_gateway_key_previous_secret_requests_total{key="ci"} 1'
        assert metric in gateway.gateway.metrics.text()
        await put_api_key(world, "sk-fleet-new", requests_per_minute=4)
        await until(lambda: not keyring.find(b"sk-fleet-old"), what="the end of the overlap")
        assert (await chat_with_key(http, gateway, "sk-fleet-old"))[0] == 401
        assert (await chat_with_key(http, gateway, "sk-fleet-new"))[0] == 200


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_anthropics_clients_get_anthropics_headers(
    world: World, http: aiohttp.ClientSession, is_streamed: bool
) -> None:
    await put_api_key(world, SECRET, requests_per_minute=1, tokens_per_minute=6000)
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    async with (
        running(FakeEngine("m-0", chat)) as engine,
        running_gateway(world.transport, KEYS_REQUIRED) as gateway,
    ):
        await world.serve("m", engine)
        await gateway.knows("m", ready=1)
        await until(lambda: bool(gateway.gateway.fleet_state.keyring), what="the key")
        waits = []
        for status in (200, 429):
            async with http.post(
                f"{gateway.url}/v1/messages",
                json={**body, "stream": is_streamed},
                headers={"x-api-key": SECRET},
            ) as answer:
                await answer.read()
                assert answer.status == status
                assert answer.headers["anthropic-ratelimit-requests-remaining"] == "0"
                assert answer.headers["anthropic-ratelimit-tokens-limit"] == "6000"
                reset = datetime.fromisoformat(answer.headers["anthropic-ratelimit-requests-reset"])
                assert timedelta(0) < reset - SystemClock().now() < timedelta(seconds=62)
                assert not [name for name in answer.headers if name.startswith("x-ratelimit")]
                waits.append(int(answer.headers.get("retry-after", 0)))
        assert 0 == waits[0] < waits[1] <= 60


async def test_nothing_is_said_of_limits_that_are_not_set(
    world: World, engine: FakeEngine, http: aiohttp.ClientSession
) -> None:
    await world.serve("m", engine)
    await put_api_key(world, SECRET)
    async with running_gateway(world.transport, KEYS_REQUIRED) as gateway:
        await gateway.knows("m", ready=1)
        await until(lambda: bool(gateway.gateway.fleet_state.keyring), what="the key")
        status, _, headers = await chat_with_key(http, gateway, SECRET)
        assert status == 200
        assert not [name for name in headers if "ratelimit" in name.lower()]


@pytest.mark.ci
async def test_gateways_share_the_rate_of_a_model_also_while_the_store_is_away(
    world: World, engine: FakeEngine, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    limits = GatewayLimits(drain_timeout_s=0.0, state_dir=tmp_path)

    def granted(gateway: Running) -> float | None:
        model = gateway.gateway.table_cache.table.models.get("m")
        limiter = model and gateway.gateway.fleet_state.access.model_rates.of(model)
        return limiter.requests.capacity if limiter and limiter.requests else None

    lease = GatewayLease(url="http://10.0.0.9:4000", version="1", asks_for_keys=False)
    other = Put(key=keys.named(keys.GATEWAY_LEASE_PREFIX, "other"), value=codec.encode(lease))
    async with running_gateway(world.transport, limits) as gateway:
        declared = with_routing("m", rateLimit={"requestsPerMinute": 10})
        await serve_deployment(world, gateway, declared, engine)
        await world.transport.commit([], [other])
        await until(lambda: granted(gateway) == 5, what="its half")
        file = SnapshotFile(tmp_path)
        await world.put_status("m", ModelDeploymentStatus())  # any change writes the file
        await until(lambda: (found := file.read()) and found.gateways == 2, what="the file")
    async with running_gateway(connect(EtcdAddress(socket=tmp_path / "nobody")), limits) as gateway:
        await gateway.knows("m", ready=0)
        assert granted(gateway) == 5
        assert (await chat_with_key(http, gateway))[2]["x-ratelimit-limit-requests"] == "5"
