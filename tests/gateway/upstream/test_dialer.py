"""Connections to engines: sockets, queues that are full, and time limits."""

import asyncio
import contextlib
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest
import uvloop
from typing_extensions import override

from gateway.upstream.call import UnreachableError
from gateway.upstream.dialer import Dialer
from machinery.clock import SystemClock
from schemas.wire.engine_address import EngineAddress
from tests.support.ports import free_port
from tests.support.waiting import until


async def connect(origin: EngineAddress, limit_s: float = 60.0) -> None:
    protocol = await Dialer(SystemClock()).connect(origin, limit_s, Connection)
    assert protocol.transport is not None
    protocol.transport.abort()


class Connection(asyncio.Protocol):
    """A connection that does nothing."""

    transport: asyncio.Transport | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)


async def test_nobody_listens() -> None:
    with pytest.raises(UnreachableError, match="refused"):
        await connect(EngineAddress("127.0.0.1", free_port()))


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux drops what its queue has no room for"
)
async def test_connecting_takes_no_longer_than_the_request_may() -> None:
    """Like a sleeping Mac: the connection is neither accepted nor refused."""
    with socket.socket() as full, contextlib.ExitStack() as waiting:
        full.bind(("127.0.0.1", free_port()))
        full.listen(0)
        for _ in range(4):
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        with pytest.raises(UnreachableError, match=r"^no connection within 0\.05 s$") as caught:
            await connect(EngineAddress(*full.getsockname()), 0.05)
        assert caught.value.is_timeout


async def test_a_socket_is_an_address_like_any_other(short_folder: Path) -> None:
    accepted: list[asyncio.StreamWriter] = []
    path = short_folder / "s"
    server = await asyncio.start_unix_server(lambda _, writer: accepted.append(writer), path)
    async with server:
        await connect(EngineAddress.at_socket(path))
        await until(lambda: len(accepted) == 1, what="the connection")
        accepted[0].transport.abort()


async def test_a_socket_on_which_nobody_listens_is_unreachable(short_folder: Path) -> None:
    origin = EngineAddress.at_socket(short_folder / "s")
    with pytest.raises(UnreachableError, match="No such file"):
        await connect(origin)
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(origin.socket)
    with pytest.raises(UnreachableError, match="Connection refused"):
        await connect(origin)


async def test_a_socket_is_not_used_once_others_may_enter_its_folder(short_folder: Path) -> None:
    origin = EngineAddress.at_socket(short_folder / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(origin.socket)
        listener.listen()
        short_folder.chmod(0o755)
        with pytest.raises(UnreachableError, match="is open to other users"):
            await connect(origin)


class BusyEngine(SystemClock):
    """Listens with a queue for one connection, and accepts one whenever the dialer sleeps."""

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

    async def run() -> None:
        origin = EngineAddress.at_socket(path)
        protocol = await Dialer(engine).connect(origin, 60.0, Connection)
        assert protocol.transport is not None
        protocol.transport.close()

    with engine.listener, ExitStack() as crowd:
        for _ in range(queued):
            crowd.enter_context(socket.socket(socket.AF_UNIX)).connect(str(path))
        # asyncio's own loop takes a full queue for a connection; gateways run on uvloop.
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run())
    assert len(engine.pauses_s) == queued
    assert all(0 < pause_s <= 0.005 for pause_s in engine.pauses_s)
