"""The floor of a proxy in Python: bare protocols on uvloop, one of the client coupled to one of the engine.

It finds where a request and an answer end, and hands bytes on: no key, no choice, no retry, no count. It is a fixed
probe of `bench.gateway`, run as `python -m bench.gateway.floor PORT ENGINE_PORT...`, and is not to be improved.
"""

import asyncio
import re
import sys
from collections import deque
from itertools import cycle
from typing import cast

import uvloop
from typing_extensions import override

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_END = b"0\r\n\r\n"
"""The last chunk. A chunk of events never ends like this: an event's own end comes before the chunk's."""


class Upstream(asyncio.Protocol):
    """A connection to an engine, and the client whose answer it carries."""

    __slots__ = ("client", "left", "pool", "request", "tail", "transport")

    def __init__(self, pool: "deque[Upstream]") -> None:
        self.pool = pool
        self.client: Client | None = None
        self.request = b""
        self.transport: asyncio.Transport | None = None
        self.left: int | None = None  # None before the head; -1 in a chunked body
        self.tail = b""

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.write(self.request)

    def send(self, client: "Client", request: bytes) -> None:
        """Send a request, at the latest when there is a connection."""
        self.client, self.request = client, request
        if self.transport is not None:
            self.transport.write(request)

    @override
    def data_received(self, data: bytes) -> None:
        client = self.client
        if client is None:
            return
        client.transport.write(data)
        if self.left is None:
            self.left = _body_left(data)
        elif self.left > 0:
            self.left -= len(data)
        self.tail = (self.tail + data[-len(_END) :])[-len(_END) :]
        if self.left == 0 or (self.left < 0 and self.tail == _END):
            self.client, self.left, self.tail = None, None, b""
            client.upstream = None
            self.pool.append(self)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        if self.client is not None:
            self.client.transport.abort()
        elif self in self.pool:
            self.pool.remove(self)


def _body_left(data: bytes) -> int:
    """Return how much of an answer's body is to come, -1 if it is chunked; engines write a head at once."""
    end = data.index(b"\r\n\r\n")
    length = _LENGTH.search(data, 0, end)
    return -1 if length is None else int(length[1]) - (len(data) - end - 4)


class Client(asyncio.Protocol):
    """A client's connection, and the engine's that answers it."""

    __slots__ = ("connecting", "pools", "request", "transport", "upstream")

    def __init__(self, pools: "cycle[tuple[int, deque[Upstream]]]") -> None:
        self.pools = pools
        self.request = b""
        self.upstream: Upstream | None = None
        self.connecting: asyncio.Task[object] | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    @override
    def data_received(self, data: bytes) -> None:
        request = self.request + data if self.request else data
        end = request.find(b"\r\n\r\n")
        length = _LENGTH.search(request, 0, end) if end >= 0 else None
        if end < 0 or (length is not None and len(request) < end + 4 + int(length[1])):
            self.request = request
            return
        self.request = b""
        port, pool = next(self.pools)
        self.upstream = upstream = pool.pop() if pool else Upstream(pool)
        upstream.send(self, request)
        if upstream.transport is None:
            loop = asyncio.get_running_loop()
            connection = loop.create_connection(lambda: upstream, "127.0.0.1", port)
            self.connecting = loop.create_task(connection)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        if self.upstream is not None and self.upstream.transport is not None:
            self.upstream.transport.abort()


async def main(port: int, engines: list[int]) -> None:
    """Serve on the port until the process is ended."""
    pools = cycle([(engine, deque[Upstream]()) for engine in engines])
    server = await asyncio.get_running_loop().create_server(
        lambda: Client(pools), "127.0.0.1", port, backlog=2048
    )
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(int(sys.argv[1]), [int(one) for one in sys.argv[2:]]))
