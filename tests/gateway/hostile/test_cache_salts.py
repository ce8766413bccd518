"""Cache salts: what a gateway tells engines about the API key of a prompt, so that keys share no cached prefixes."""

import hashlib
import re
from collections.abc import AsyncIterator

import aiohttp
import pytest

from machinery.clock import SystemClock
from store.memory import MemoryTransport
from tests.support.gateway_calls import KEYS_REQUIRED, SECRET, put_api_key, with_routing
from tests.support.gateway_engine_scripts import chat
from tests.support.gateway_fake_engine import FakeEngine, running
from tests.support.gateway_world import Running, World, running_gateway
from tests.support.waiting import until


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with running(FakeEngine("m-0", chat)) as made:
        yield made


@pytest.fixture
async def world(engine: FakeEngine) -> World:
    world = World(MemoryTransport(SystemClock()))
    await world.serve("m", engine)
    return world


@pytest.fixture
async def gateway(world: World) -> AsyncIterator[Running]:
    async with running_gateway(world.transport, KEYS_REQUIRED) as made:
        await made.knows("m", ready=1)
        yield made


async def test_each_key_has_a_salt_of_its_own_that_clients_cannot_set(
    world: World, gateway: Running, http: aiohttp.ClientSession, engine: FakeEngine
) -> None:
    await put_api_key(world, SECRET)
    await put_api_key(world, "sk-fleet-two", name="two")
    await until(lambda: gateway.gateway.fleet_state.keyring.find(b"sk-fleet-two"), what="the key")

    async def salt_of(secret: str, **headers: str) -> str | None:
        headers["authorization"] = f"Bearer {secret}"
        body = {"model": "m", "messages": []}
        async with http.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers) as a:
            assert a.status == 200
        return engine.calls[-1].headers.get("x-fleet-cache-salt")

    one, two = await salt_of(SECRET), await salt_of("sk-fleet-two")
    assert one is not None
    assert two is not None
    assert re.fullmatch("[0-9a-f]{32}", one)
    assert one != two
    assert await salt_of(SECRET, **{"x-fleet-cache-salt": two}) == one
    for secret in (SECRET, "sk-fleet-two"):
        digest = hashlib.sha256(secret.encode()).hexdigest()
        assert one not in digest
        assert two not in digest

    # Keys share the cache where the deployment says so, and its route if there is one.
    await world.put(with_routing("m", cacheSharing="Deployment"))
    models = gateway.gateway.table_cache
    await until(lambda: models.table.models["m"].shares_cache, what="the change")
    assert await salt_of(SECRET, **{"x-fleet-cache-salt": two}) is None
