"""The connection pool with a real server: split, truncated, surplus and slow responses."""

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest
import uvloop
from typing_extensions import override

from gateway.upstream.call import BrokenResponseError, UnreachableError
from gateway.upstream.connection_pool import ConnectionPool
from gateway.upstream.dialer import Dialer
from machinery.clock import SystemClock
from schemas.wire.engine_address import EngineAddress
from tests.support.clock import FakeClock
from tests.support.gateway_raw_server import (
    CHUNKED,
    LENGTH,
    REQUEST,
    Answering,
    Server,
    in_steps,
    serving,
    then_closing,
)
from tests.support.ports import free_port
from tests.support.waiting import until


@pytest.fixture
async def pool() -> AsyncIterator[ConnectionPool]:
    made = ConnectionPool(SystemClock(), Dialer(SystemClock()), silence_s=60)
    yield made
    made.close()
    await asyncio.sleep(0)


async def ask(pool: ConnectionPool, origin: EngineAddress) -> bytes:
    answer = await pool.request(origin, REQUEST)
    try:
        parts = []
        while piece := await answer.read():
            parts.append(piece)
        assert await answer.read() == b""
        return b"%d " % answer.status + b"".join(parts)
    finally:
        answer.close()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("data", [LENGTH, CHUNKED], ids=["length", "chunked"])
async def test_any_split_gives_the_same_answer_and_the_connection_again(
    pool: ConnectionPool, data: bytes, size: int
) -> None:
    async with serving(in_steps(data, size)) as (server, origin):
        assert [await ask(pool, origin) for _ in range(3)] == [b"200 hello"] * 3
        assert (server.connections, server.requests) == (1, 3)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        pytest.param(b"HTTP/1.1 204 No Content\r\n\r\n", b"204 ", id="no-content"),
        pytest.param(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b"200 ", id="empty"),
        pytest.param(b"HTTP/1.1 100 Continue\r\n\r\n" + LENGTH, b"200 hello", id="continue"),
        pytest.param(
            b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + CHUNKED, b"200 hello", id="hints"
        ),
    ],
)
async def test_odd_but_right(pool: ConnectionPool, data: bytes, expected: bytes) -> None:
    async with serving(data) as (server, origin):
        assert [await ask(pool, origin) for _ in range(2)] == [expected] * 2
        assert server.connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(LENGTH.replace(b"X-A: b", b"Connection: close"), id="asked-to-close"),
        pytest.param(b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello", id="http-1.0"),
        pytest.param(LENGTH + b"HTTP/1.1 200 OK\r\n", id="surplus"),
        pytest.param(LENGTH + b"garbage", id="garbage-after"),
        pytest.param(then_closing(LENGTH), id="closed-after"),
        pytest.param(then_closing(b"HTTP/1.1 200 OK\r\n\r\nhello"), id="ends-with-connection"),
    ],
)
async def test_such_connections_are_not_used_again(
    pool: ConnectionPool, answer: Answering | bytes
) -> None:
    async with serving(answer) as (server, origin):
        for _ in range(2):
            assert await ask(pool, origin) == b"200 hello"
            await asyncio.sleep(0.03)
        assert server.connections == 2


@pytest.mark.parametrize(
    ("answer", "had_bytes"),
    [
        pytest.param(then_closing(b""), False, id="nothing"),
        pytest.param(then_closing(b"", is_abrupt=True), False, id="reset"),
        pytest.param(then_closing(LENGTH[:20]), True, id="half-a-head"),
        pytest.param(then_closing(LENGTH[:-1]), True, id="half-a-body"),
        pytest.param(then_closing(CHUNKED[:-2]), True, id="no-last-chunk"),
        pytest.param(b"SSH-2.0-OpenSSH_9.6\r\n", True, id="not-http"),
        pytest.param(b"HTTP/1.1 101 Switching\r\nupgrade: x\r\n\r\n", True, id="upgrade"),
        pytest.param(CHUNKED.replace(b"2\r\n", b"zz\r\n"), True, id="bad-chunk"),
        pytest.param(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 500_000, True, id="endless-head"),
    ],
)
async def test_broken_answers(
    pool: ConnectionPool, answer: Answering | bytes, had_bytes: bool
) -> None:
    async with serving(answer) as (server, origin):
        with pytest.raises(BrokenResponseError) as caught:
            await ask(pool, origin)
        assert caught.value.had_bytes == had_bytes
        await until(lambda: server.ended or server.writers[0].is_closing(), what="the end")


async def test_a_connection_closed_while_idle_costs_nothing(pool: ConnectionPool) -> None:
    """The engine closes the connection in the moment in which the next request is sent."""
    async with serving(LENGTH, then_closing(b"", is_abrupt=True), LENGTH) as (server, origin):
        assert await ask(pool, origin) == b"200 hello"
        assert await ask(pool, origin) == b"200 hello"
        assert (server.connections, server.requests) == (2, 3)


async def test_a_fresh_connection_gets_no_second_chance(pool: ConnectionPool) -> None:
    async with serving(then_closing(b"")) as (server, origin):
        with pytest.raises(BrokenResponseError):
            await ask(pool, origin)
        assert server.requests == 1


async def test_after_a_first_byte_nothing_is_sent_again(pool: ConnectionPool) -> None:
    async with serving(LENGTH, then_closing(LENGTH[:9])) as (server, origin):
        await ask(pool, origin)
        with pytest.raises(BrokenResponseError):
            await ask(pool, origin)
        assert server.requests == 2


async def test_nobody_listens(pool: ConnectionPool) -> None:
    with pytest.raises(UnreachableError, match="refused"):
        await ask(pool, EngineAddress("127.0.0.1", free_port()))


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux drops what its queue has no room for"
)
async def test_connecting_takes_no_longer_than_the_request_may(pool: ConnectionPool) -> None:
    """Like a sleeping Mac: the connection is neither accepted nor refused."""
    with socket.socket() as full, contextlib.ExitStack() as waiting:
        full.bind(("127.0.0.1", free_port()))
        full.listen(0)
        for _ in range(4):
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        with pytest.raises(UnreachableError, match=r"^no connection within 0\.05 s$") as caught:
            await pool.request(EngineAddress(*full.getsockname()), REQUEST, silence_s=0.05)
        assert caught.value.is_timeout


async def test_unrequested_bytes_never_become_a_response(pool: ConnectionPool) -> None:
    async with serving(LENGTH) as (server, origin):
        await ask(pool, origin)
        server.writers[0].write(LENGTH.replace(b"hello", b"wrong"))
        await until(lambda: server.ended, what="the connection being cut")
        assert await ask(pool, origin) == b"200 hello"


async def test_a_cancelled_request_cuts_the_connection(pool: ConnectionPool) -> None:
    async with serving(in_steps(b"", 1)) as (server, origin):
        async with asyncio.TaskGroup() as group:
            request = group.create_task(pool.request(origin, REQUEST))
            await until(lambda: server.requests == 1, what="the request")
            request.cancel()
        await until(lambda: server.ended, what="the engine noticing")


async def test_silence_is_ended_and_idleness_too() -> None:
    clock = FakeClock()
    pool = ConnectionPool(clock, Dialer(clock), silence_s=10)
    async with serving(LENGTH, in_steps(b"", 1)) as (server, origin):
        assert await ask(pool, origin) == b"200 hello"
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(_broken(pool, origin))
            await until(lambda: server.requests == 2, what="the second request")
            await clock.advance(9.9)
            pool.sweep(clock.monotonic())
            assert not asking.done()
            await clock.advance(0.2)
            pool.sweep(clock.monotonic())
        assert asking.result().is_silence
        assert server.requests == 2
    pool.close()


@pytest.mark.parametrize(
    ("silence_s", "until_s", "said"),
    [(0.2, float("inf"), "silent for 0.2 s"), (60.0, 0.2, "its time was up")],
    ids=["silence", "time"],
)
async def test_a_limit_below_a_second_is_held(silence_s: float, until_s: float, said: str) -> None:
    clock = FakeClock()
    pool = ConnectionPool(clock, Dialer(clock), silence_s=10)
    async with serving(LENGTH, in_steps(b"", 1)) as (server, origin), asyncio.TaskGroup() as group:
        keeping = group.create_task(pool.run())
        # The first leaves the connection idle, the second reuses it and is checked often.
        (await pool.request(origin, REQUEST, silence_s=0.2)).close()
        asking = group.create_task(_given_up(pool, origin, silence_s, until_s))
        await until(lambda: server.requests == 2, what="the second request")
        await clock.advance(0.19)
        assert not asking.done()
        await clock.advance(0.1)
        assert asking.done()
        assert str(asking.result()) == said
        keeping.cancel()
    pool.close()


async def test_idle_connections_are_closed_before_engines_close_them() -> None:
    clock = FakeClock()
    pool = ConnectionPool(clock, Dialer(clock), silence_s=10)
    async with serving(LENGTH) as (server, origin):
        await ask(pool, origin)
        await clock.advance(60.1)
        pool.sweep(clock.monotonic())
        await until(lambda: server.ended, what="the connection being closed")


async def _given_up(
    pool: ConnectionPool, origin: EngineAddress, silence_s: float, until_s: float
) -> BrokenResponseError:
    with pytest.raises(BrokenResponseError) as caught:
        await pool.request(origin, REQUEST, silence_s=silence_s, until_s=until_s)
    return caught.value


async def _broken(pool: ConnectionPool, origin: EngineAddress) -> BrokenResponseError:
    with pytest.raises(BrokenResponseError) as caught:
        await ask(pool, origin)
    return caught.value


@asynccontextmanager
async def serving_on_socket(path: Path) -> AsyncIterator[tuple[Server, EngineAddress]]:
    server = Server(LENGTH)
    listening = await asyncio.start_unix_server(server.serve, path)
    try:
        yield server, EngineAddress.at_socket(path)
    finally:
        listening.close()
        for writer in server.writers:
            writer.transport.abort()


async def test_a_socket_is_an_address_like_any_other(
    pool: ConnectionPool, short_folder: Path
) -> None:
    async with serving_on_socket(short_folder / "s") as (server, origin):
        assert [await ask(pool, origin) for _ in range(3)] == [b"200 hello"] * 3
        assert (server.connections, server.requests) == (1, 3)


async def test_a_socket_on_which_nobody_listens_is_unreachable(
    pool: ConnectionPool, short_folder: Path
) -> None:
    origin = EngineAddress.at_socket(short_folder / "s")
    with pytest.raises(UnreachableError, match="No such file"):
        await ask(pool, origin)
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(origin.socket)
    with pytest.raises(UnreachableError, match="Connection refused"):
        await ask(pool, origin)


async def test_a_socket_is_not_used_once_others_may_enter_its_folder(
    pool: ConnectionPool, short_folder: Path
) -> None:
    async with serving_on_socket(short_folder / "s") as (server, origin):
        short_folder.chmod(0o755)
        with pytest.raises(UnreachableError, match="is open to other users"):
            await ask(pool, origin)
        assert server.connections == 0


class BusyEngine(SystemClock):
    """Listens with a queue for one connection, and accepts one whenever the pool sleeps."""

    def __init__(self, path: Path) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen(0)
        self.pauses_s: list[float] = []

    @override
    async def sleep(self, seconds: float) -> None:
        self.pauses_s.append(seconds)
        self.listener.accept()[0].close()


@pytest.mark.skipif(sys.platform != "linux", reason="macOS makes a queue longer than it is told")
@pytest.mark.parametrize("queued", [0, 1])
def test_a_full_queue_of_a_busy_engine_is_waited_for(short_folder: Path, queued: int) -> None:
    path = short_folder / "s"
    engine = BusyEngine(path)

    async def connect() -> None:
        pool = ConnectionPool(engine, Dialer(engine), silence_s=60)
        async with asyncio.TaskGroup() as group:
            request = group.create_task(pool.request(EngineAddress.at_socket(path), REQUEST))
            await until(lambda: bool(pool.open), what="a connection")
            accepted, _ = engine.listener.accept()
            with accepted:
                accepted.sendall(LENGTH)
                assert (await request).status == 200
        pool.close()

    with engine.listener, ExitStack() as crowd:
        for _ in range(queued):
            crowd.enter_context(socket.socket(socket.AF_UNIX)).connect(str(path))
        # asyncio's own loop takes a full queue for a connection; gateways run on uvloop.
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(connect())
    assert len(engine.pauses_s) == queued
    assert all(0 < pause_s <= 0.005 for pause_s in engine.pauses_s)
