"""Connections of an engine: idle ones, unfinished requests, too many of them, and clients that do not read."""

import asyncio
import http.client
import json
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from engine.api import web
from engine.api.connections import EngineConnectionLimits, EngineHttpProtocol
from machinery.http_server import HttpServer, listen
from schemas.wire import connections
from tests.support.engine_process import START_S, Engine, Start, eventually
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(120)
HOST = "127.0.0.1"
GET = b"GET /fine HTTP/1.1\r\nhost: localhost\r\n\r\n"
LAST = GET[:-2] + b"connection: close\r\n\r\n"
LIMITS = EngineConnectionLimits()
# Steps that the test is not about must not end by their limit.
HURRIED = replace(LIMITS, idle_s=0.3)


class Streams:
    """The streams that run now."""

    def __init__(self) -> None:
        self.count = 0
        self.sent = 0
        """Pieces of generated streams."""
        self.left = 0
        """Slow requests whose client was gone before the answer."""

    async def endless(self, _: Request) -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            self.count += 1
            try:
                while True:
                    yield b"x" * 4096
                    await asyncio.sleep(0)
            finally:
                self.count -= 1

        return StreamingResponse(pieces())

    async def generated(self, _: Scope, receive: Receive, send: Send) -> None:
        """Send pieces until the client is gone, as the engine's responses do."""
        await web.run_while_connected(receive, self._send_pieces(send))

    async def _send_pieces(self, send: Send) -> None:
        self.count += 1
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": b"x" * 4096, "more_body": True})
                self.sent += 1
                await asyncio.sleep(0)
        finally:
            self.count -= 1

    async def slow(self, request: Request) -> Response:
        """Answer after a second, unless the client leaves before."""
        self.count += 1
        try:
            for _ in range(20):
                await asyncio.sleep(0.05)  # the work of a slow answer
                if await request.is_disconnected():
                    self.left += 1
                    break
        finally:
            self.count -= 1
        return PlainTextResponse("slow")

    async def fine(self, request: Request) -> Response:
        return PlainTextResponse(f"fine {len(await request.body())}")


@asynccontextmanager
async def serving(
    limits: EngineConnectionLimits, streams: Streams | None = None
) -> AsyncIterator[int]:
    """Yield the port of a server with an engine's connections."""
    app = streams or Streams()
    routes = [
        Route("/fine", app.fine, methods=["GET", "POST"]),
        Route("/endless", app.endless),
        Route("/slow", app.slow),
        Mount("/generated", app.generated),
    ]
    protocol: Any = partial(EngineHttpProtocol, limits, limits.limiter())
    server = HttpServer(
        uvicorn.Config(
            Starlette(routes=routes),
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            timeout_keep_alive=60,
            timeout_graceful_shutdown=1,
        ),
        lambda: None,
    )
    with listen(HOST, 0) as listener:
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve(sockets=[listener]))
            await until(lambda: server.started, what="the server")
            yield int(listener.getsockname()[1])
            server.should_exit = True


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def answer(port: int, sent: bytes) -> bytes:
    """Send, and return all that comes until the other side closes."""
    async with asyncio.timeout(20), connected(port) as (reader, writer):
        writer.write(sent)
        with suppress(ConnectionResetError):
            return await reader.read(-1)
        return b""


async def half_closed(port: int, sent: bytes) -> bytes:
    """Send, end the sending side as `nc -N` does, and return all that comes until the other side closes."""
    async with asyncio.timeout(20), connected(port) as (reader, writer):
        writer.write(sent)
        writer.write_eof()
        return await reader.read(-1)


POST = b"POST /fine HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "limits"),
    [
        pytest.param(b"", HURRIED, id="says-nothing"),
        pytest.param(b"GET /fi", replace(LIMITS, head_s=0.3), id="half-a-line"),
        pytest.param(GET[:-2] + b"x-a: ", replace(LIMITS, head_s=0.3), id="half-a-header"),
        pytest.param(POST + b"half", replace(LIMITS, body_s=0.3), id="half-a-body"),
        pytest.param(GET, HURRIED, id="idle-after-an-answer"),
        pytest.param(GET + b"GET /f", replace(HURRIED, head_s=0.3), id="half-a-second-request"),
        pytest.param(GET + POST + b"123456789", HURRIED, id="idle-after-two-answers"),
    ],
)
async def test_a_connection_that_does_not_go_on_is_closed(
    sent: bytes, limits: EngineConnectionLimits
) -> None:
    async with serving(limits) as port:
        received = await answer(port, sent)
        answered = 0 if sent.startswith(POST) else sent.count(b"\r\n\r\n")
        assert received.count(b"200 OK") == answered
        assert b"200 OK" in await answer(port, LAST)


async def test_a_request_that_arrives_slowly_is_answered() -> None:
    async with serving(HURRIED) as port, asyncio.timeout(20), connected(port) as (reader, writer):
        for part in (POST[:20], POST[20:], b"1234", b"56789"):
            writer.write(part)
            await asyncio.sleep(0.4)  # longer than an idle connection may last
        assert b"fine 9" in await reader.readuntil(b"fine 9")


async def test_a_client_that_only_stops_sending_gets_its_answer() -> None:
    """Finding A9: its answer, one interim response that every client skips, and the end of the connection."""
    streams = Streams()
    async with serving(LIMITS, streams) as port:
        received = await half_closed(port, GET.replace(b"fine", b"slow"))
        interim, _, response = received.partition(b"\r\n\r\n")
        assert interim == b"HTTP/1.1 100 Continue"
        assert response.startswith(b"HTTP/1.1 200 OK\r\n")
        assert response.endswith(b"\r\n\r\nslow")
        assert await half_closed(port, b"") == b""
        assert await half_closed(port, POST + b"half") == b""
    assert (streams.count, streams.left) == (0, 0)


async def test_pythons_client_skips_the_interim_response() -> None:
    def ask(port: int) -> tuple[int, bytes]:
        client = http.client.HTTPConnection(HOST, port, timeout=20)
        client.request("GET", "/slow")
        assert client.sock is not None
        client.sock.shutdown(socket.SHUT_WR)
        response = client.getresponse()
        return response.status, response.read()

    async with serving(LIMITS) as port:
        assert await asyncio.to_thread(ask, port) == (200, b"slow")


@pytest.mark.parametrize("how", [socket.SHUT_RDWR, None])
async def test_a_client_that_closes_its_connection_is_gone(how: int | None) -> None:
    """Its machine resets the connection at the interim response, whichever way it was closed."""
    streams = Streams()
    async with serving(LIMITS, streams) as port:
        for _ in range(3):
            with socket.create_connection((HOST, port)) as client:
                client.sendall(GET.replace(b"fine", b"slow"))
                await until(lambda: streams.count == 1, what="the request")
                if how is not None:
                    client.shutdown(how)
            await until(lambda: streams.count == 0, what="the end of the request")
    assert streams.left == 3


async def test_a_stream_goes_on_to_a_client_that_only_stops_sending() -> None:
    streams = Streams()
    async with serving(LIMITS, streams) as port:
        async with connected(port) as (reader, writer):
            writer.write(GET.replace(b"fine", b"endless"))
            writer.write_eof()
            async with asyncio.timeout(20):
                await reader.readexactly(1 << 20)
            assert streams.count == 1
        await until(lambda: streams.count == 0, limit_s=20, what="the end of the stream")


async def test_an_idle_connection_makes_room_for_a_new_one() -> None:
    """The one that has waited longest; not one with a request, and not one that was just used."""
    streams = Streams()
    limits = replace(LIMITS, connections=3)
    async with serving(limits, streams) as port, AsyncExitStack() as stack:
        busy = await stack.enter_async_context(connected(port))
        busy[1].write(GET.replace(b"fine", b"endless"))
        assert await busy[0].readuntil(b"\r\n\r\n")
        first = await stack.enter_async_context(connected(port))
        used = await stack.enter_async_context(connected(port))
        for line in (first, used):
            line[1].write(GET)
            assert await line[0].readuntil(b"fine 0")
        for _ in range(20):
            newer = await stack.enter_async_context(connected(port))
            newer[1].write(GET)
            async with asyncio.timeout(20):
                assert await newer[0].readuntil(b"fine 0")
        with suppress(ConnectionError):
            assert await first[0].read(-1) == b""
        assert await busy[0].readexactly(4096)


async def test_a_connection_is_refused_if_all_others_have_a_request() -> None:
    streams = Streams()
    async with serving(replace(LIMITS, connections=2), streams) as port, AsyncExitStack() as stack:
        for _ in range(2):
            _, writer = await stack.enter_async_context(connected(port))
            writer.write(GET.replace(b"fine", b"endless"))
        await until(lambda: streams.count == 2, what="two streams")
        refused = await answer(port, GET)
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in refused


@asynccontextmanager
async def unread(
    port: int, streams: Streams, path: bytes = b"endless"
) -> AsyncIterator[socket.socket]:
    """Yield a connection whose stream is not read."""
    with socket.create_connection((HOST, port)) as lazy:
        lazy.sendall(GET.replace(b"fine", path))
        await until(lambda: streams.count == 1, what="the stream")
        yield lazy


async def test_a_stream_that_nobody_reads_ends_after_a_while() -> None:
    streams = Streams()
    async with serving(replace(LIMITS, stall_s=0.5), streams) as port, unread(port, streams):
        await until(lambda: streams.count == 0, limit_s=20, what="the end of the stream")


async def test_nothing_more_is_made_for_a_client_that_is_gone() -> None:
    """A client that stalls has tokens waiting; to encode them for nobody would hold the event loop."""
    streams = Streams()
    async with serving(LIMITS, streams) as port:
        async with unread(port, streams, b"generated/") as lazy:
            sent = -1
            while sent != streams.sent:
                sent = streams.sent
                await asyncio.sleep(0.5)
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await until(lambda: streams.count == 0, what="the end of the stream")
        assert streams.sent == sent


async def test_it_ends_sooner_while_others_wait() -> None:
    streams, waiting = Streams(), False
    limits = replace(LIMITS, crowded_stall_s=0.5, stall_s=3600, is_crowded=lambda: waiting)
    async with serving(limits, streams) as port, unread(port, streams):
        await asyncio.sleep(1.5)
        assert streams.count == 1
        waiting = True
        await until(lambda: streams.count == 0, limit_s=20, what="the end of the stream")


async def test_a_slow_reader_is_not_taken_for_one_that_does_not_read() -> None:
    streams = Streams()
    limits = replace(LIMITS, stall_s=1, crowded_stall_s=1, is_crowded=lambda: True)
    async with serving(limits, streams) as port, unread(port, streams) as slow:
        slow.settimeout(0)
        for _ in range(30):
            await asyncio.sleep(0.1)
            with suppress(BlockingIOError):
                slow.recv(128 << 10)
        assert streams.count == 1


def test_gateways_give_up_idle_connections_before_engines_do() -> None:
    assert LIMITS.idle_s > connections.POOL_IDLE_S


@pytest.mark.mlx
def test_a_crowd_of_idle_connections_does_not_keep_others_out(engine: Engine) -> None:
    """The engine closes those that have waited longest."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    crowd: list[socket.socket] = []
    try:
        crowd += [socket.create_connection((HOST, engine.port), timeout=60) for _ in range(1500)]
        assert engine.chat(max_tokens=2).status == 200
    finally:
        for one in crowd:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.mlx
def test_an_engine_answers_a_client_that_only_stops_sending(engine: Engine) -> None:
    gone = engine.stderr.read_text().count('"outcome": "client_gone"')
    messages = [{"role": "user", "content": "hi"}]
    fields = {"model": "tiny", "messages": messages, "ignore_eos": True, "max_tokens": 20}
    body = json.dumps(fields).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {HOST}\r\ncontent-type: application/json\r\n"
    )
    sent = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    with socket.create_connection((HOST, engine.port), timeout=60) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        received = b"".join(iter(lambda: client.recv(65536), b""))
    interim, _, response = received.partition(b"\r\n\r\n")
    assert interim == b"HTTP/1.1 100 Continue"
    assert response.startswith(b"HTTP/1.1 200 OK\r\n")
    assert json.loads(response.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] > 0
    for _ in range(3):  # these do not wait for an answer
        with socket.create_connection((HOST, engine.port), timeout=60) as client:
            client.sendall(sent.replace(b'"max_tokens": 20', b'"max_tokens":999'))
    eventually(
        lambda: engine.stderr.read_text().count('"outcome": "client_gone"') == gone + 3,
        what="the end of the requests of clients that left",
    )


@pytest.mark.mlx
@pytest.mark.full
def test_a_stream_that_nobody_reads_gives_up_its_slot(start: Start, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.tiny_model", str(tmp_path / "tiny")]
    subprocess.run([*command, "--endless", "--context", "60000"], check=True)
    engine = start(tmp_path / "tiny", context_length=60_000, concurrency=1, queue_depth=4)
    eventually(engine.is_ready, within_s=START_S)
    unread_ = engine.begin(max_tokens=59_000, stream=True, logprobs=True, top_logprobs=20)
    eventually(lambda: engine.busy() == (1, 0))
    assert engine.chat(max_tokens=2).status == 200
    eventually(lambda: '"outcome": "client_gone"' in engine.stderr.read_text())
    (line,) = [x for x in engine.stderr.read_text().splitlines() if '"client_gone"' in x]
    assert json.loads(line)["completion_tokens"] < 59_000
    unread_.close()


@pytest.mark.ci
@pytest.mark.mlx
def test_a_low_limit_of_files_is_told(start_process: Start, tiny: Path, tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))"
    (tmp_path / "sitecustomize.py").write_text(limit)
    engine = start_process(tiny, shadow=f"{tmp_path}:{Path.cwd()}")
    assert engine.wait() == 2
    assert "`ulimit -n 4096`" in engine.last_words()
    assert "512 open files" in engine.last_words()
    assert "Traceback" not in engine.stderr.read_text()
