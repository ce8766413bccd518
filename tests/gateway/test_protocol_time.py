"""Clients that leave, that are slow, that say nothing; and the end of the gateway itself."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from typing_extensions import override

from gateway.server import GatewayLimits
from tests.gateway.fake_engine import FakeEngine, running
from tests.gateway.raw_client import RawClient, connected, get, post
from tests.gateway.scripts import DONE, echo, slow, streams
from tests.gateway.world import Running, World, running_gateway
from tests.support.clock import HurriedClock
from tests.support.waiting import until, until_async

BODY = b'{"model":"m"}'
STREAM = b'{"model":"m","stream":true}'
FOR_EVER = slow(60.0, echo)


class SkippingClock(HurriedClock):
    """The machine's, but time can be skipped."""

    skipped_s = 0.0

    @override
    def monotonic(self) -> float:
        return super().monotonic() + self.skipped_s


@dataclass
class Fleet:
    """A gateway, one engine and a connection."""

    gateway: Running
    engine: FakeEngine
    client: RawClient
    clock: SkippingClock

    def connections(self) -> int:
        return len(self.gateway.gateway._server.server_state.connections)

    async def is_asked(self) -> None:
        await until(lambda: self.engine.calls, what="a request at the engine")

    async def is_free(self) -> None:
        await until(lambda: not self.connections(), what="no connection")
        await until(lambda: not self.gateway.gateway.loads.total(), what="no load")


@pytest.fixture
async def fleet(world: World) -> AsyncIterator[Fleet]:
    clock = SkippingClock()
    async with (
        running(FakeEngine("m-0", echo)) as engine,
        running_gateway(world.transport, GatewayLimits(drain_timeout_s=0.0), clock) as gateway,
        connected(gateway.url) as client,
    ):
        await world.serve("m", engine)
        await gateway.knows("m", ready=1)
        yield Fleet(gateway, engine, client, clock)


async def test_clients_that_leave_before_a_request_is_whole(fleet: Fleet) -> None:
    raw = post(BODY)
    for cut in (0, 1, 40, raw.index(b"\r\n\r\n") + 3, len(raw) - 1):
        async with connected(fleet.gateway.url) as client:
            await client.send(raw[:cut])
            await until(lambda: fleet.connections() == 2)
        await until(lambda: fleet.connections() == 1)
    assert fleet.engine.calls == []


async def test_a_client_that_leaves_while_the_engine_works(fleet: Fleet) -> None:
    fleet.engine.script = FOR_EVER
    await fleet.client.send(post(BODY))
    await fleet.is_asked()
    fleet.client.writer.transport.abort()
    await fleet.is_free()
    await until(lambda: fleet.engine.abandoned == 1)


async def test_a_client_that_leaves_in_a_stream(fleet: Fleet) -> None:
    fleet.engine.script = streams(10_000, pause_s=0.001)
    await fleet.client.send(post(STREAM))
    await fleet.client.line()
    fleet.client.writer.close()
    await fleet.is_free()
    await until(lambda: fleet.engine.abandoned == 1)


async def test_a_client_that_leaves_with_requests_waiting(fleet: Fleet) -> None:
    fleet.engine.script = streams(10_000, pause_s=0.001)
    await fleet.client.send(post(STREAM) + post(BODY) + post(BODY)[:-2])
    await fleet.is_asked()
    fleet.client.writer.transport.abort()
    await fleet.is_free()
    assert len(fleet.engine.calls) == 1


async def test_half_closing_is_leaving(fleet: Fleet) -> None:
    """As for nginx and Go: nothing tells it from a client that is gone, whose place must be freed."""
    fleet.engine.script = FOR_EVER
    await fleet.client.send(post(BODY))
    await fleet.is_asked()
    fleet.client.writer.write_eof()
    assert await fleet.client.is_closed()
    await fleet.is_free()


async def test_who_says_nothing_is_not_kept(fleet: Fleet) -> None:
    await until(lambda: fleet.connections() == 1)
    fleet.clock.skipped_s = 59.0
    async with connected(fleet.gateway.url) as late:
        await late.send(post(BODY))
        assert (await late.answer()).status == 200
        fleet.clock.skipped_s = 61.0
        assert await fleet.client.is_closed()
        fleet.clock.skipped_s = 59.0 + 74.0
        await late.send(b"\r\n", post(BODY))  # the empty line is no request, and does not help
        assert (await late.answer()).status == 200
        fleet.clock.skipped_s += 76.0
        assert await late.is_closed()


@pytest.mark.parametrize("cut", [1, 50, -1])
@pytest.mark.parametrize("path", ["/v1/completions", "/nothing"])
async def test_requests_that_do_not_come(fleet: Fleet, path: str, cut: int) -> None:
    await fleet.client.send(post(BODY, path=path)[:cut])
    await until(lambda: fleet.connections() == 1)
    if path == "/nothing" and cut == -1:  # answered without its body
        assert (await fleet.client.answer()).status == 404
    else:
        await asyncio.sleep(0.02)
        fleet.clock.skipped_s = 61.0
        answer = await fleet.client.answer()
        assert (answer.status, answer.code) == (408, "body_timeout")
        assert answer.headers["connection"] == "close"
        assert await fleet.client.is_closed()
    assert fleet.engine.calls == []


@pytest.mark.parametrize("cut", [40, -1])
async def test_no_stream_is_cut_for_the_next_request(fleet: Fleet, cut: int) -> None:
    async def until_told(call: object) -> None:
        await told.wait()
        await streams(3, pause_s=0)(call)  # type: ignore[arg-type]  # a script, wrapped

    told = asyncio.Event()
    fleet.engine.script = until_told
    await fleet.client.send(post(STREAM) + post(BODY)[:cut])
    await fleet.is_asked()
    fleet.clock.skipped_s = 61.0
    await asyncio.sleep(0.05)  # several looks at connections that are late
    told.set()
    assert (await fleet.client.answer()).body.endswith(DONE)
    fleet.clock.skipped_s += 130.0
    assert (await fleet.client.answer()).status == 408


async def test_the_last_answer_says_so(fleet: Fleet) -> None:
    fleet.engine.script = slow(0.1, echo)
    async with connected(fleet.gateway.url) as idle, connected(fleet.gateway.url) as silent:
        await idle.send(get("/health"))
        await idle.answer()
        await fleet.client.send(post(BODY))
        await fleet.is_asked()
        fleet.gateway.gateway.stop()
        answer = await fleet.client.answer()
        assert (answer.status, answer.headers["connection"]) == (503, "close")  # no time to drain
        assert await fleet.client.is_closed()
        assert await idle.is_closed()
        assert await silent.is_closed()


async def refuses(url: str) -> bool:
    try:
        async with connected(url):
            return False
    except ConnectionError:
        return True


async def test_idle_connections_are_served_for_a_moment_more(world: World) -> None:
    async with (
        running(FakeEngine("m-0", streams(3, pause_s=0.3))) as engine,
        running_gateway(world.transport, GatewayLimits(drain_timeout_s=10.0)) as gateway,
        connected(gateway.url) as streaming,
        connected(gateway.url) as idle,
        connected(gateway.url) as cold,
    ):
        await world.serve("m", engine)
        await gateway.knows("m", ready=1)
        for client in (idle, cold):
            await client.send(get("/health"))
            assert "connection" not in (await client.answer()).headers
        await streaming.send(post(STREAM))
        await until(lambda: engine.calls)
        await streaming.line()
        gateway.gateway.stop()
        await until_async(lambda: refuses(gateway.url), what="no listener")
        engine.script = echo
        await idle.send(post(BODY))
        await cold.send(get("/health"))
        for client in (idle, cold):
            answer = await client.answer()
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            assert await client.is_closed()
        rest = await streaming.reader.readuntil(b"0\r\n\r\n")
        assert DONE in rest
        assert await streaming.is_closed()
