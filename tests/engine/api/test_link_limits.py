"""Streams of an engine link whose gateway does not read, or reads slowly, and links on which nothing is read."""

import asyncio
import socket
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from engine.api import web
from engine.api.connections import EngineConnectionLimits, EngineHttpProtocol
from engine.api.link import LinkMiddleware
from machinery import engine_link
from machinery.engine_link import END, EVENTS, FAIL, WINDOW, WINDOW_BYTES, FrameReader, RequestHead
from machinery.http_server import HttpServer, listen
from tests.support.link_client import UPGRADE, send_all
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(120)
HOST = "127.0.0.1"
LIMITS = EngineConnectionLimits()
PIECE = 48 << 10


class App:
    """An endless response, and one that has a length."""

    def __init__(self) -> None:
        self.running = 0
        self.sent = 0
        """Pieces of endless responses."""
        self.received = 0
        """Parts of a body."""

    async def endless(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the client is gone, as the engine's responses do."""
        await web.run_while_connected(receive, self._send_pieces(send))

    async def _send_pieces(self, send: Send) -> None:
        self.running += 1
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": bytes(PIECE), "more_body": True})
                self.sent += 1
                await asyncio.sleep(0)
        finally:
            self.running -= 1

    async def parts(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the parts of a body."""
        while (await receive())["more_body"]:
            self.received += 1
        await PlainTextResponse()(scope, receive, send)

    async def body(self, request: Request) -> Response:
        return PlainTextResponse(await request.body())

    async def fine(self, _: Request) -> Response:
        return PlainTextResponse("fine")

    async def whole(self, _: Request) -> Response:
        return PlainTextResponse(bytes(range(250)) * 1200)


class Link:
    """A gateway's side of one link."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, engine: asyncio.Transport
    ) -> None:
        self.reader, self.writer = reader, writer
        self.engine = engine
        """The engine's side of the connection."""
        self.frames = FrameReader(engine_link.MAX_RESPONSE_PAYLOAD)
        self.kinds: defaultdict[int, list[int]] = defaultdict(list)
        self.bodies: defaultdict[int, bytes] = defaultdict(bytes)

    def send(self, stream: int, kind: int, payload: bytes) -> None:
        self.writer.write(engine_link.frame(stream, kind, payload))

    def get(self, stream: int, path: str) -> None:
        head = engine_link.encode_request(RequestHead("GET", path, b"", 0), b"")
        self.send(stream, engine_link.REQUEST, head)

    def post(self, stream: int, size: int, body: bytes, path: str = "/body") -> None:
        head = engine_link.encode_request(RequestHead("POST", path, b"", size), body)
        self.send(stream, engine_link.REQUEST, head)

    def grant(self, stream: int, granted: int) -> None:
        self.send(stream, WINDOW, engine_link.encode_window(granted))

    async def read(self) -> None:
        data = await self.reader.read(1 << 16)
        assert data, "the engine has closed the link"
        for stream, kind, payload in self.frames.feed(data):
            self.kinds[stream].append(kind)
            if kind in (EVENTS, END):
                self.bodies[stream] += payload if stream == 1 else b""


@asynccontextmanager
async def linked(limits: EngineConnectionLimits, app: App) -> AsyncIterator[Link]:
    """Yield a link to a server with an engine's connections."""
    routes = [
        Mount("/endless", app.endless),
        Mount("/parts", app.parts),
        Route("/whole", app.whole),
        Route("/fine", app.fine),
        Route("/body", app.body, methods=["POST"]),
    ]
    # Any: uvicorn's type knows classes only, and makes one by calling it.
    protocol: Any = partial(EngineHttpProtocol, limits, limits.limiter())
    config = uvicorn.Config(
        LinkMiddleware(Starlette(routes=routes), limits, None),
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        timeout_graceful_shutdown=1,
    )
    server = HttpServer(config, lambda: None)
    with listen(HOST, 0) as listener:
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve(sockets=[listener]))
            await until(lambda: server.started, what="the server")
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE)
            client.connect(listener.getsockname())
            reader, writer = await asyncio.open_connection(sock=client)
            writer.write(UPGRADE % b"")
            assert await reader.readuntil(b"\r\n\r\n") == engine_link.SWITCHING
            (protocol,) = server.server_state.connections
            yield Link(reader, writer, protocol.transport)
            writer.close()
            await until(lambda: not app.running, what="the end of the streams")
            server.should_exit = True


@pytest.mark.ci
async def test_a_stream_that_is_not_read_ends_beside_one_that_is() -> None:
    """The other one fills the link again and again, which is no sign that the first one is read."""
    app = App()
    async with linked(replace(LIMITS, stall_s=6, crowded_stall_s=6), app) as link:
        link.get(1, "/endless/")
        link.get(2, "/endless/")
        link.grant(2, (1 << 32) - 1)
        async with asyncio.timeout(30):
            while FAIL not in link.kinds[1]:
                await link.read()
                await asyncio.sleep(0.005)  # slower than the engine, whose link is full each time
        assert WINDOW_BYTES <= len(link.bodies[1]) < WINDOW_BYTES + PIECE
        assert link.kinds[1][-1] == FAIL
        assert FAIL not in link.kinds[2]
        await until(lambda: app.running == 1, what="the end of the first")


async def test_a_stream_that_is_granted_nothing_ends() -> None:
    app = App()
    async with linked(replace(LIMITS, stall_s=1, crowded_stall_s=1), app) as link:
        link.get(1, "/endless/")

        async def grant_nothing() -> None:
            while True:
                link.grant(1, 0)
                await asyncio.sleep(0.02)

        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            granting = group.create_task(grant_nothing())
            while FAIL not in link.kinds[1]:
                await link.read()
            granting.cancel()
        await until(lambda: not app.running, what="the end of the stream")
        assert app.sent * PIECE == len(link.bodies[1]), "nothing was made that could not be sent"


@pytest.mark.ci
async def test_a_stream_that_is_read_byte_by_byte_goes_on() -> None:
    """Longer than a stream may stall; the window is below zero meanwhile."""
    async with linked(replace(LIMITS, stall_s=6, crowded_stall_s=6), App()) as link:
        link.get(1, "/whole")
        async with asyncio.timeout(30):
            while len(link.bodies[1]) < WINDOW_BYTES:
                await link.read()
        for _ in range(14):
            link.grant(1, 1)
            await asyncio.sleep(0.5)
        link.grant(1, WINDOW_BYTES)
        async with asyncio.timeout(30):
            while link.kinds[1][-1] not in (END, FAIL):
                await link.read()
        assert link.kinds[1][-1] == END
        assert link.bodies[1] == bytes(range(250)) * 1200


async def test_a_gateway_that_reads_nothing_is_not_read_either() -> None:
    """Otherwise the refusals of its requests would take all memory."""
    requests = 40_000
    async with linked(LIMITS, App()) as link:

        async def send() -> None:
            for stream in range(1, requests + 1):
                link.get(stream, "/fine")
                await link.writer.drain()

        def unsent() -> int:
            return link.engine.get_write_buffer_size()

        async with asyncio.timeout(100), asyncio.TaskGroup() as group:
            group.create_task(send())
            await until(lambda: not link.engine.is_reading() or unsent() > 4 << 20, limit_s=60)
            assert unsent() < 4 << 20
            while sum(kinds[-1] in (END, FAIL) for kinds in link.kinds.values()) < requests:
                await link.read()


@pytest.mark.ci
async def test_a_body_that_stays_incomplete_ends_its_stream() -> None:
    """Parts that go on arriving do not prolong the time, as over HTTP."""
    async with linked(replace(LIMITS, body_s=2), App()) as link:
        link.post(1, 10_000, b"a")
        link.post(2, 10, b"a" * 10)
        link.post(3, 10, b"")
        link.send(3, engine_link.BODY, b"a" * 10)

        async def send_slowly() -> None:
            while True:
                link.send(1, engine_link.BODY, b"a")
                await asyncio.sleep(0.1)

        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            sending = group.create_task(send_slowly())
            while FAIL not in link.kinds[1]:
                await link.read()
            sending.cancel()
        assert (link.kinds[2][-1], link.kinds[3][-1]) == (END, END)


def test_a_flood_of_frames_lets_others_run() -> None:
    """uvloop, which an engine runs on, reads 32 times before it does anything else."""
    count = 1_000_000
    frame = engine_link.frame(1, engine_link.BODY, b"a")

    async def flood() -> int:
        app, most = App(), 0
        async with linked(LIMITS, app) as link, asyncio.TaskGroup() as group:
            link.post(1, count + 1, b"a", "/parts/")
            await until(lambda: app.received, what="the request")
            gateway = link.writer.get_extra_info("socket").fileno()
            group.create_task(asyncio.to_thread(send_all, gateway, frame * count))
            while (before := app.received) < count:
                await asyncio.sleep(0)
                most = max(most, app.received - before)
            while END not in link.kinds[1]:
                await link.read()
        return most

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        most = runner.run(flood())
    assert most * len(frame) <= 256 << 10, "more than one read"
