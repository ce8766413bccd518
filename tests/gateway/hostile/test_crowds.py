"""Many idle clients and some greedy ones: others are served, and memory stays bounded."""

import asyncio
import resource
from contextlib import AsyncExitStack

import pytest

from tests.support.gateway_raw_stand import BODY, LAST, Stand, post
from tests.support.gateway_recording_engine import ENDLESS
from tests.support.waiting import until

_MB = 1 << 20


async def test_idle_connections(stand: Stand) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    count, before = min(2000, limit - 500), stand.rss()
    async with AsyncExitStack() as stack:
        for number in range(count):
            _, writer = await stack.enter_async_context(stand.connection())
            if number % 2:
                writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nx-half: a")
        assert await stand.is_well()
        # Without the kernel's buffers; a connection takes some 10 kB.
        assert stand.rss() - before < count * 40_000


@pytest.mark.ci
async def test_idle_connections_hold_no_request_data(stand: Stand) -> None:
    # Answered bodies of 1 MB: anything kept of one would be kept a thousand times.
    before = stand.rss()
    async with AsyncExitStack() as stack:
        for number in range(100):
            reader, writer = await stack.enter_async_context(stand.connection())
            writer.write(post(b'{"model":"m","session_id":"%d%b"}' % (number, b"s" * _MB)))
            await reader.readuntil(b"\r\n\r\n")
            stand.engine.clear()
        assert stand.rss() - before < 60 * _MB


async def test_byte_by_byte(stand: Stand) -> None:
    data = post(BODY, b"x-request-id: slow") + LAST
    pieces = [data[at : at + 1] for at in range(len(data))]
    assert await stand.statuses(*pieces) == [200, 200]
    assert [request.body for request in stand.engine.requests] == [BODY]


async def test_many_that_never_finish_a_request(stand: Stand) -> None:
    before = stand.rss()
    async with AsyncExitStack() as stack:
        for _ in range(200):
            _, writer = await stack.enter_async_context(stand.connection())
            writer.write(post(b" " * 200_000)[:100_000])
        assert await stand.is_well()
        assert stand.rss() - before < 200 * 200_000 + 20 * _MB
    assert [request.body for request in stand.engine.requests] == [BODY]


async def test_clients_that_do_not_read(stand: Stand) -> None:
    body, before = b'{"model":"m","stream":true,"prompt":%b}' % ENDLESS, stand.rss()
    async with AsyncExitStack() as stack:
        for _ in range(20):
            reader, writer = await stack.enter_async_context(stand.connection())
            writer.write(post(body))
            await reader.readuntil(b"\r\n\r\n")
            writer.transport.pause_reading()  # type: ignore[attr-defined]  # it is a ReadTransport, too
        # All of them stall once engines cannot send either.
        sent = -1

        def stuck() -> bool:
            nonlocal sent
            is_stuck, sent = sent == stand.engine.streamed_bytes, stand.engine.streamed_bytes
            return is_stuck

        await until(stuck, what="engines that wait")
        assert await stand.is_well()
        assert stand.rss() - before < 40 * _MB

    def left() -> bool:
        return stand.engine.streaming == 0

    # Engines notice that the rest is not wanted.
    await until(left, what="the streams' end")


async def test_clients_that_ask_and_leave(stand: Stand) -> None:
    body = b'{"model":"m","stream":true,"prompt":%b}' % ENDLESS

    async def once() -> None:
        async with stand.connection() as (reader, writer):
            writer.write(post(body))
            await reader.readuntil(b"\r\n\r\n")

    await asyncio.gather(*(once() for _ in range(30)))
    await until(lambda: stand.engine.streaming == 0, what="the streams' end")
