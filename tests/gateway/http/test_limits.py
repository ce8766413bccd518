"""Connections of one address are bounded; what one client may not have is left for others."""

import asyncio
from contextlib import AsyncExitStack

import orjson

from gateway.limits import GatewayLimits
from tests.support.gateway_world import running_gateway
from tests.support.waiting import until, until_async

HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def test_one_connection_too_many_is_refused_until_another_ends() -> None:
    limits = GatewayLimits(drain_timeout_s=0.0, max_connections_per_address=2)
    async with running_gateway(limits=limits) as gateway:
        port = int(gateway.url.rpartition(":")[2])

        async def status() -> tuple[bytes, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEALTH)
            return await reader.readuntil(b"\r\n\r\n"), writer

        stream_writers: list[asyncio.StreamWriter] = []

        async def is_kept() -> bool:
            # The connection before may not be counted off yet.
            head, writer = await status()
            if b" 200 " in head:
                stream_writers.append(writer)
            else:
                writer.close()
            return len(stream_writers) == 2

        assert await until_async(is_kept)
        async with gateway.get("/health") as response:
            assert response.status == 503
            error = orjson.loads(await response.read())["error"]
        assert (error["code"], "--max-connections-per-address" in error["message"]) == (
            "too_many_connections",
            True,
        )
        assert gateway.gateway.metrics.shed.value("address") == 1
        stream_writers.pop().close()

        async def is_admitted() -> bool:
            head, writer = await status()
            writer.close()
            return b" 200 " in head

        assert await until_async(is_admitted)
        stream_writers.pop().close()


async def test_a_body_whose_last_piece_has_no_room_is_refused() -> None:
    limits = GatewayLimits(max_body_bytes=200_000, max_body_memory_bytes=200_000)
    async with running_gateway(limits=limits) as gateway, AsyncExitStack() as stack:
        port = int(gateway.url.rpartition(":")[2])
        memory = gateway.gateway.handler.body_memory

        async def send(
            length: int, part: bytes
        ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            used = memory.used
            head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
            writer.write(head % length + part)
            await until(lambda: memory.used == used + len(part), what="the part of the body")
            return reader, writer

        await send(199_000, b"x" * 140_000)
        reader, writer = await send(66_000, b"y" * 55_000)
        writer.write(b"y" * 11_000)
        async with asyncio.timeout(10):
            assert b" 503 " in await reader.readuntil(b"\r\n\r\n")
