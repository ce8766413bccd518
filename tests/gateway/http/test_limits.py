"""Connections of one address are bounded; what one client may not have is left for others."""

import asyncio

import aiohttp
import orjson
import pytest

from gateway.http.limits import USUAL_CONNECTIONS, AddressLimit, ShedReason
from gateway.server import GatewayLimits
from tests.support.gateway_world import World, running_gateway
from tests.support.waiting import until_async

HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


def test_each_address_is_counted_alone_and_ipv6_by_network() -> None:
    shed: list[ShedReason] = []
    limit = AddressLimit(2, shed.append)
    first, second = limit.enter("10.0.0.1"), limit.enter("10.0.0.1")
    assert limit.enter("10.0.0.1") is None
    assert limit.enter("10.0.0.2") is not None
    assert [limit.enter(f"2001:db8::{at}") is None for at in (1, 2, 3)] == [False, False, True]
    assert shed == ["address", "address"]
    assert first is not None
    assert second is not None
    limit.leave(first)
    assert limit.enter("10.0.0.1") is not None


@pytest.mark.parametrize(
    ("host", "is_free"), [("127.0.0.1", True), ("::1", True), ("10.0.0.1", False)]
)
def test_this_machine_is_not_limited_unless_the_operator_says_so(
    host: str, *, is_free: bool
) -> None:
    usual, given = AddressLimit(None, lambda _: None), AddressLimit(1, lambda _: None)
    found = [usual.enter(host) for _ in range(USUAL_CONNECTIONS + 1)]
    assert (found[-1] is not None) == is_free
    assert [given.enter(host) is None for _ in range(2)] == [False, True]
    assert AddressLimit(0, lambda _: None).enter(host) == ""


async def test_one_connection_too_many_is_refused_until_another_ends(
    world: World, http: aiohttp.ClientSession
) -> None:
    limits = GatewayLimits(drain_timeout_s=0.0, max_connections_per_address=2)
    async with running_gateway(world.transport, limits) as gateway:
        port = int(gateway.url.rpartition(":")[2])

        async def status() -> tuple[bytes, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEALTH)
            return await reader.readuntil(b"\r\n\r\n"), writer

        kept: list[asyncio.StreamWriter] = []

        async def is_kept() -> bool:
            # The connection before may not be counted off yet.
            head, writer = await status()
            if b" 200 " in head:
                kept.append(writer)
            else:
                writer.close()
            return len(kept) == 2

        assert await until_async(is_kept)
        async with http.get(gateway.url + "/health") as response:
            assert response.status == 503
            error = orjson.loads(await response.read())["error"]
        assert (error["code"], "--max-connections-per-address" in error["message"]) == (
            "too_many_connections",
            True,
        )
        assert gateway.gateway.metrics.shed.value("address") == 1
        kept.pop().close()

        async def is_admitted() -> bool:
            head, writer = await status()
            writer.close()
            return b" 200 " in head

        assert await until_async(is_admitted)
        kept.pop().close()
