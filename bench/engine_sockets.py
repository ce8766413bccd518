"""Cost of a request to an engine on a port of the loopback address and on a Unix socket: `make bench-engine-sockets`.

The gateway's own connection pool asks a process that answers at once. Both kinds take turns, so that what else the
machine does is the same for both. Prints medians, and as its last line one JSON object, ratios first.
"""

import asyncio
import multiprocessing
import socket
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import uvloop
from typing_extensions import override

from bench.result import finish, sized
from gateway.upstream.connection_pool import ConnectionPool
from machinery import unix_sockets
from machinery.clock import SystemClock
from machinery.http_server import listen
from schemas.wire.engine_address import EngineAddress

ROUNDS, REQUESTS, STREAMS = sized((15, 1000, 30), smoke=(2, 20, 2))
EVENTS = 200
_EVENT = b"data: " + b"x" * 180 + b"\n\n"
_HEADERS = b"host: a\r\ncontent-length: 0\r\n\r\n"
_WHOLE, _STREAM = b"GET / HTTP/1.1\r\n" + _HEADERS, b"POST / HTTP/1.1\r\n" + _HEADERS


class _Answers(asyncio.Protocol):
    """Answers GET at once and POST with a stream of events, one in each turn of its loop."""

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._left = 0

    @override
    def data_received(self, data: bytes) -> None:
        if data.startswith(b"GET"):
            self._write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(_EVENT) + _EVENT)
            return
        self._write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        self._left = EVENTS
        self._send_event()

    def _send_event(self) -> None:
        if not self._left:
            self._write(b"0\r\n\r\n")
            return
        self._left -= 1
        self._write(b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT))
        asyncio.get_running_loop().call_soon(self._send_event)

    def _write(self, data: bytes) -> None:
        self._transport.write(data)  # type: ignore[attr-defined]  # uvloop's transports inherit from none of asyncio's


def _serve(listeners: Sequence[socket.socket]) -> None:
    async def serve() -> None:
        for one in listeners:
            await asyncio.get_running_loop().create_server(_Answers, sock=one)
        await asyncio.Event().wait()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


async def _median_us(pool: ConnectionPool, address: EngineAddress, raw: bytes, count: int) -> float:
    """Return the median time of a request, from sending it to the end of its answer."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        response = await pool.request(address, raw)
        while await response.read():
            pass
        response.close()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


async def _measure(addresses: dict[str, EngineAddress]) -> dict[str, dict[str, float]]:
    """Return microseconds by what is measured and by kind of address."""
    pool = ConnectionPool(SystemClock(), silence_s=60)
    found: dict[str, dict[str, list[float]]] = {
        what: {kind: [] for kind in addresses} for what in ("request", "event", "new connection")
    }
    for _ in range(ROUNDS):
        for kind, address in addresses.items():
            request_us = await _median_us(pool, address, _WHOLE, REQUESTS)
            stream_us = await _median_us(pool, address, _STREAM, STREAMS)
            found["request"][kind].append(request_us)
            found["event"][kind].append(stream_us / EVENTS)
            fresh = []
            for _ in range(STREAMS):
                pool.close()
                await asyncio.sleep(0)
                fresh.append(await _median_us(pool, address, _WHOLE, 1))
            found["new connection"][kind].append(statistics.median(fresh) - request_us)
    pool.close()
    return {
        what: {kind: statistics.median(times) for kind, times in row.items()}
        for what, row in found.items()
    }


def main() -> None:
    """Run the bench."""
    with TemporaryDirectory(prefix="fleet-") as folder:
        unix, _ = unix_sockets.listen(Path(folder) / "s")
        tcp = listen("127.0.0.1", 0)
        addresses = {
            "port": EngineAddress(*tcp.getsockname()),
            "socket": EngineAddress.at_socket(Path(folder) / "s"),
        }
        server = multiprocessing.get_context("fork").Process(target=_serve, args=([unix, tcp],))
        server.start()
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                found = runner.run(_measure(addresses))
        finally:
            server.kill()
            server.join()
    for what, row in found.items():
        print(what.ljust(16) + "".join(f"{kind} {us:8.1f} us   " for kind, us in row.items()))
    ratios = {
        f"{what.replace(' ', '_')}_socket_to_port": round(row["socket"] / row["port"], 2)
        for what, row in found.items()
    }
    figures = {what.replace(" ", "_") + "_us": row for what, row in found.items()}
    finish("engine-sockets", ratios, figures)


if __name__ == "__main__":
    main()
