"""Cache salts: what a gateway tells engines about the API key of a prompt, so that keys share no cached prefixes."""

import hashlib
import re
from collections.abc import AsyncIterator

import pytest

from tests.support.gateway_calls import KEYS_REQUIRED, SECRET, with_routing
from tests.support.gateway_engine_scripts import chat
from tests.support.gateway_world import Running, running_gateway
from tests.support.waiting import until


@pytest.fixture
async def gateway() -> AsyncIterator[Running]:
    async with running_gateway(limits=KEYS_REQUIRED) as made:
        yield made


async def test_each_key_has_a_salt_of_its_own_that_clients_cannot_set(gateway: Running) -> None:
    (engine,) = await gateway.serve(chat)
    await gateway.add_key(SECRET)
    await gateway.add_key("sk-fleet-two", "two")

    async def salt_of(secret: str, **headers: str) -> str | None:
        headers["authorization"] = f"Bearer {secret}"
        body = {"model": "m", "messages": []}
        async with gateway.post(json=body, headers=headers) as a:
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
    await gateway.world.put(with_routing("m", cacheSharing="Deployment"))
    models = gateway.gateway.table_cache
    await until(lambda: models.table.models["m"].shares_cache, what="the change")
    assert await salt_of(SECRET, **{"x-fleet-cache-salt": two}) is None
