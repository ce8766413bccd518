"""The gateway's own log over HTTP, with tickets of the store."""

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from gateway.limits import GatewayLimits
from insight.tickets import issue_ticket
from machinery.process_log import LogRing
from store import keys
from tests.support.gateway_world import Running, World, running_gateway
from tests.support.waiting import until, until_async

PATH = "/v1/logs/gateway"


@pytest.fixture
async def gateway(world: World) -> AsyncIterator[Running]:
    ring = LogRing()
    for message in ("one", "two", "three"):
        ring.handle(logging.LogRecord("test", logging.INFO, "", 1, message, (), None))
    # A follower that delayed the shutdown would do so for a minute.
    limits = GatewayLimits(asks_for_keys=True, drain_timeout_s=60.0, ring=ring)
    async with asyncio.timeout(50), running_gateway(world.transport, limits) as running:
        yield running


async def principal(world: World) -> str:
    """Return the principal of the ticket: the id under which the gateway is registered."""

    async def registered() -> str:
        items = (await world.transport.list(keys.GATEWAY_LEASE_PREFIX)).items
        return items[0].key.removeprefix(keys.LEASE_PREFIX) if items else ""

    return await until_async(registered, what="the registration")


async def test_the_log_is_shown_for_a_ticket(gateway: Running) -> None:
    async with issue_ticket(gateway.world.transport, await principal(gateway.world)) as bearer:
        headers = {"authorization": f"Bearer {bearer}"}
        async with gateway.get(PATH, headers=headers) as response:
            assert (response.status, await response.text()) == (200, "one\ntwo\nthree\n")
        async with gateway.get(f"{PATH}?tail=1", headers=headers) as response:
            assert await response.text() == "three\n"
        async with gateway.get(f"{PATH}?since=soon", headers=headers) as response:
            assert response.status == 400
        # A ticket is not a key for anything else.
        async with gateway.get("/v1/models", headers=headers) as response:
            assert response.status == 401


async def test_only_admins_see_it(gateway: Running) -> None:
    async with issue_ticket(gateway.world.transport, "Gateway/another") as bearer:
        for shown in ("", f"Bearer {bearer}", "Bearer sk-fleet-something"):
            headers = {"authorization": shown} if shown else {}
            async with gateway.get(PATH, headers=headers) as response:
                assert response.status == 401
                assert "ticket" in (await response.json())["error"]["message"]


async def test_a_follower_does_not_delay_the_shutdown(gateway: Running) -> None:
    async with issue_ticket(gateway.world.transport, await principal(gateway.world)) as bearer:
        headers = {"authorization": f"Bearer {bearer}"}
        async with gateway.get(f"{PATH}?follow=true", headers=headers) as response:
            assert await response.content.readany() == b"one\ntwo\nthree\n"
            gateway.gateway.stop()
            assert await response.content.read() == b""
        await until(lambda: gateway.gateway.load_tracker.total() == 0)
