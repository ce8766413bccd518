"""The plain listener: how many connections a turn of the event loop accepts, and what happens without a free file."""

import asyncio
import contextlib
import resource
import socket
from collections.abc import Iterator

import pytest
import uvloop
from typing_extensions import override

from machinery.listener import PlainListener


class Counted(asyncio.Protocol):
    """A connection that counts itself."""

    def __init__(self, made: list["Counted"], is_made: asyncio.Event | None = None) -> None:
        self.transport: asyncio.BaseTransport | None = None
        self._made, self._is_made = made, is_made

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._made.append(self)
        if self._is_made is not None:
            self._is_made.set()


@pytest.fixture
def sock() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listening:
        yield listening


def connect(sock: socket.socket, count: int) -> list[socket.socket]:
    return [socket.create_connection(sock.getsockname()) for _ in range(count)]


def test_a_few_turns_accept_a_hundred_connections(sock: socket.socket) -> None:
    made: list[Counted] = []

    async def turns() -> int:
        listener = PlainListener(sock, lambda: Counted(made))
        clients = connect(sock, 100)
        count = 0
        while len(made) < len(clients):
            count += 1
            await asyncio.sleep(0)
        listener.close()
        await listener.wait_closed()
        assert all(connection.transport is not None for connection in made)
        for client in clients:
            client.close()
        return count

    # uvloop's own server takes a turn for each.
    assert uvloop.run(turns()) < 20


async def test_a_listener_without_a_free_file_accepts_later(sock: socket.socket) -> None:
    made: list[Counted] = []
    is_made = asyncio.Event()
    client = connect(sock, 1)[0]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[socket.socket] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 20, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                held.append(socket.socket())
        listener = PlainListener(sock, lambda: Counted(made, is_made))
        await asyncio.sleep(0.05)  # the loop sees the connection
        assert not made
    finally:
        for extra in held:
            extra.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    async with asyncio.timeout(30):
        await is_made.wait()
    listener.close()
    client.close()
