"""The admin server, and clients that must not disturb the main work."""

import asyncio
import gc
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from machinery.clock import SystemClock
from machinery.http_server import AdminServer, ConnectionLimits, listen
from tests.support.clock import HurriedClock
from tests.support.waiting import until, until_async

HOST = "127.0.0.1"
HURRIED = ConnectionLimits(idle_s=0.3, head_s=0.3, flush_s=0.3, stall_s=0.3, connections=5)
GET = b"GET /fine HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def fine(_: Request) -> Response:
    return PlainTextResponse("fine")


async def large(_: Request) -> Response:
    return Response(b"x" * (32 << 20))


async def endless(_: Request) -> Response:
    async def pieces() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 65536
            await asyncio.sleep(0)

    return StreamingResponse(pieces())


async def silent(_: Request) -> Response:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"first"
        await asyncio.Event().wait()

    return StreamingResponse(pieces())


APP = Starlette(routes=[Route(f"/{one.__name__}", one) for one in (fine, large, endless, silent)])


@asynccontextmanager
async def serving(patience: ConnectionLimits | None = None) -> AsyncIterator[int]:
    """Yield the port of a server that answers."""
    changed = asyncio.Event()
    server = AdminServer(APP, SystemClock(), (HOST, 0), changed.set, limits=patience)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(server.run())
        await changed.wait()
        yield int(server.url.rpartition(":")[2])
        running.cancel()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def response(port: int, request: bytes, *, limit_s: float = 20.0) -> bytes:
    """Send, and return all that comes until the other side closes."""
    async with asyncio.timeout(limit_s), connected(port) as (reader, writer):
        writer.write(request)
        with suppress(ConnectionResetError):
            return await reader.read(-1)
        return b""


async def test_one_request_gets_one_answer() -> None:
    async with serving() as port:
        answer = await response(port, GET + GET)
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"connection: close\r\n" in answer
        assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("request_", [
    pytest.param(b"", id="says-nothing"),
    pytest.param(b"GET /fi", id="half-a-line"),
    pytest.param(b"GET /fine HTTP/1.1\r\nhost: localhost\r\nx-a: ", id="half-a-header"),
])  # fmt: skip
async def test_a_client_that_does_not_finish_its_request_is_dropped(request_: bytes) -> None:
    async with serving(HURRIED) as port:
        assert await response(port, request_) == b""
        assert b"200 OK" in await response(port, GET)


async def test_a_drop_now_and_then_does_not_help() -> None:
    async with serving(HURRIED) as port, asyncio.timeout(20), connected(port) as (reader, writer):
        writer.write(b"GET /fine HTTP/1.1\r\n")
        with suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b"x-a: b\r\n")
                await writer.drain()
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.02):
                        assert await reader.read(1) == b""


async def test_headers_without_end_are_refused() -> None:
    async with serving() as port:
        answer = await response(port, b"GET /fine HTTP/1.1\r\nx-a: " + b"b" * (80 << 10))
        assert answer.startswith(b"HTTP/1.1 431 ") or answer == b""


async def test_what_is_no_http_is_refused() -> None:
    async with serving() as port:
        assert (await response(port, b"\x16\x03\x01\x02\x00\r\n\r\n")).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("path", [b"/large", b"/endless"])
async def test_a_client_that_does_not_read_is_dropped(path: bytes) -> None:
    """The answer does not fit into the kernel's buffers."""
    only_one = ConnectionLimits(flush_s=0.2, stall_s=0.2, connections=1)
    async with serving(only_one) as port:
        with socket.create_connection((HOST, port)) as lazy:
            lazy.sendall(b"GET " + path + b" HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await served(port)


async def served(port: int) -> None:
    """Wait until there is room for one more."""

    async def is_served() -> bool:
        with suppress(TimeoutError):
            return b"200 OK" in await response(port, GET)
        return False

    await until_async(is_served, limit_s=60, what="room for one more")


async def test_requests_behind_one_that_is_answered_are_not_kept() -> None:
    """One read may have 5,000 requests of a stranger, which took 2 KB and 50 us each."""

    def count() -> int:
        return sum(isinstance(obj, RequestResponseCycle) for obj in gc.get_objects())

    async with serving() as port, connected(port) as (reader, writer), asyncio.timeout(20):
        before = count()
        writer.write(b"GET /silent HTTP/1.1\r\nhost: localhost\r\n\r\n" + GET * 5000)
        await writer.drain()
        await reader.readuntil(b"first")
        assert count() - before < 500


async def test_connections_without_a_request_make_room_for_new_ones() -> None:
    """Whoever holds connections open without a request, or with half of one, shuts out nobody."""
    async with serving(ConnectionLimits(connections=3)) as port, AsyncExitStack() as idle:
        busy = await idle.enter_async_context(connected(port))
        busy[1].write(b"GET /silent HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b"200 OK" in await busy[0].readuntil(b"first")
        for half in (b"", b"GET /fi", b"POST /fine HTTP/1.1\r\ncontent-length: 9\r\n\r\nhalf") * 3:
            _, writer = await idle.enter_async_context(connected(port))
            writer.write(half)
            assert b"200 OK" in await response(port, GET)
        assert not busy[0].at_eof()


async def test_a_connection_is_refused_if_all_others_have_a_request() -> None:
    async with serving(ConnectionLimits(connections=3)) as port, AsyncExitStack() as busy:
        writers = []
        for _ in range(3):
            reader, writer = await busy.enter_async_context(connected(port))
            writer.write(b"GET /silent HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert b"200 OK" in await reader.readuntil(b"first")
            writers.append(writer)
        assert (await response(port, GET)).startswith(b"HTTP/1.1 503 ")
        writers[0].close()
        await served(port)


@pytest.mark.parametrize(("host", "status"), [
    (b"evil.example", b"421"), (b"localhost:4001", b"200"), (b"127.0.0.1", b"200"),
])  # fmt: skip
async def test_a_name_that_is_not_this_machines_is_refused(host: bytes, status: bytes) -> None:
    """A web page whose name leads here could read the answer (DNS rebinding)."""
    async with serving() as port:
        answer = await response(port, b"GET /fine HTTP/1.1\r\nhost: %b\r\n\r\n" % host)
        assert answer.startswith(b"HTTP/1.1 %b " % status)


async def test_shutdown_does_not_wait_for_followers() -> None:
    async with asyncio.timeout(20), AsyncExitStack() as stack:
        async with serving() as port:
            reader, writer = await stack.enter_async_context(connected(port))
            writer.write(b"GET /silent HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert b"200 OK" in await reader.readuntil(b"first")
        with pytest.raises(OSError, match="Connect call failed"):
            await asyncio.open_connection(HOST, port)


async def test_a_port_in_use_is_reported_and_tried_again() -> None:
    changes = 0

    def changed() -> None:
        nonlocal changes
        changes += 1

    with listen(HOST, 0) as taken:
        port = taken.getsockname()[1]
        server = AdminServer(APP, HurriedClock(), (HOST, port), changed)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(server.run())
            await until(lambda: server.error, what="the error of the server")
            assert (server.url, changes) == ("", 1)
            assert server.error == f"port {port} on {HOST}: address already in use"
            taken.close()
            await until(lambda: server.url, what="the second try")
            assert (server.error, changes) == ("", 2)
            assert b"200 OK" in await response(port, GET)
            running.cancel()


async def test_signals_stay_the_process_own() -> None:
    received = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, received.set)
    before = signal.getsignal(signal.SIGTERM)
    async with serving():
        assert signal.getsignal(signal.SIGTERM) is before
        os.kill(os.getpid(), signal.SIGUSR1)
        async with asyncio.timeout(10):
            await received.wait()
    loop.remove_signal_handler(signal.SIGUSR1)
