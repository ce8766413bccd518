"""Hostile clients beside honest ones: `make bench-gateway-hostile`, under two minutes.

Four honest connections ask all the time; p50 and p99 are theirs, before and during. What the hostile ones cost of the
processor is part of it: they share the cores with the gateway, and send as fast as is said. The last line is JSON.
"""

import asyncio
import resource
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import uvloop
from tabulate import tabulate

from bench.gateway import loading, ours
from bench.gateway.loading import Load
from bench.gateway.parts import Engine, Programs, compiled, free_port, rss_mb
from bench.result import finish, sized

Crowd: TypeAlias = Callable[[int], AbstractAsyncContextManager[None]]
"""Hostile clients of a port, for as long as the context lasts."""

_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n" % (
    ours.KEY.encode()
)
_SECONDS = sized(3.0, smoke=0.3)
# For the gateway to close thousands of connections.
_CALM_S = 1.5
_ATTACKERS = 8
_PAUSE_S = 0.02
_STREAM = b'{"model":"talk","stream":true,"messages":[]}'


def _post(body: bytes) -> bytes:
    return b"%bcontent-length: %d\r\n\r\n%b" % (_HEAD, len(body), body)


_DEEP = _post(b'{"model":"bench","messages":' + b"[" * 100_000)
_SHOTS = {
    "deep JSON, 100 kB": _DEEP,
    "header bombs, 64 kB": _HEAD + b"x-a: %b\r\n" % (b"a" * 1000) * 64,
    "smuggling": _HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "half requests": _post(b" " * 200_000)[:100_000],
    "wrong keys": _post(b'{"model":"bench"}').replace(ours.KEY.encode(), b"sk-fleet-wrong"),
}


@dataclass(frozen=True)
class Row:
    """The effects on honest clients."""

    crowd: str
    p50_us: float
    p99_us: float
    failed: int
    rss_mb: float


@asynccontextmanager
async def nobody(_: int) -> AsyncIterator[None]:
    yield


def idle(count: int, said: bytes, *, settle_s: float = 0.0) -> Crowd:
    """Connections that say this, and then nothing; it may take a moment until the gateway is through with it."""

    @asynccontextmanager
    async def crowd(port: int) -> AsyncIterator[None]:
        writers = []
        for _ in range(count):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            sock.setblocking(False)  # noqa: FBT003 - as it is called
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
            _, writer = await asyncio.open_connection(sock=sock)
            writer.write(said)
            writer.transport.pause_reading()  # type: ignore[attr-defined]  # it is a ReadTransport, too
            writers.append(writer)
        await asyncio.sleep(settle_s)
        try:
            yield
        finally:
            for writer in writers:
                writer.transport.abort()

    return crowd


def shooting(shot: bytes) -> Crowd:
    """Clients that send this again and again, each on a new connection."""

    async def shoot(port: int) -> None:
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(shot)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_PAUSE_S):
                        await reader.read(1000)
                writer.transport.abort()
            await asyncio.sleep(_PAUSE_S)

    @asynccontextmanager
    async def crowd(port: int) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(shoot(port)) for _ in range(_ATTACKERS)]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()

    return crowd


def crowds() -> dict[str, Crowd]:
    """Return the crowds by what they do."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    count = min(sized(10_000, smoke=200), limit - 500)
    return {
        "nobody": nobody,
        f"{count} idle": idle(count, b""),
        f"{count // 10} in a head": idle(
            count // 10, b"POST /v1/chat/completions HTTP/1.1\r\nx-a: b"
        ),
        # More than 10 MB each, of which the kernel keeps some.
        "16 that do not read": idle(16, _post(_STREAM), settle_s=sized(10.0, smoke=1.0)),
        **{name: shooting(shot) for name, shot in _SHOTS.items()},
    }


async def measured(programs: Programs, gateway: ours.Ours, name: str) -> Row:
    load = Load(port=gateway.port, connections=4, seconds=_SECONDS, is_streamed=False, key=ours.KEY)
    records = await loading.run(programs, load)
    well = records[records["outcome"] == 0]["whole_s"] * 1e6
    p50_us, p99_us = (round(float(np.percentile(well, q)), 1) for q in (50, 99))
    return Row(name, p50_us, p99_us, len(records) - len(well), rss_mb(gateway.pid))


async def main() -> None:
    """Measure and print."""
    began_s = time.monotonic()
    rows: list[tuple[Row, Row]] = []
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet-bench-")))
        programs = compiled(folder)
        engine = Engine(programs, "bench-0", free_port(), ("delay_us=2000",))
        talker = Engine(programs, "talk-0", free_port(), ("tokens=60000",))
        for one in (engine, talker):
            one.start()
            stack.callback(one.end)
        gateway = await ours.start(stack, folder, {"bench": [engine], "talk": [talker]})
        await measured(programs, gateway, "warm")
        first_rss_mb = rss_mb(gateway.pid)
        for name, crowd in crowds().items():
            # Each beside a baseline of its own: the machine may be shared with others.
            base = await measured(programs, gateway, name)
            async with crowd(gateway.port):
                rows.append((base, await measured(programs, gateway, name)))
            await asyncio.sleep(_CALM_S)
    ratios = {
        row.crowd: (round(row.p50_us / base.p50_us, 2), round(row.p99_us / base.p99_us, 2))
        for base, row in rows
    }
    table = [
        [row.crowd, row.p50_us, row.p99_us, *ratios[row.crowd], row.failed, row.rss_mb]
        for _, row in rows
    ]
    columns = ["beside", "p50 us", "p99 us", "p50 ratio", "p99 ratio", "failed", "RSS MB"]
    print(tabulate(table, headers=columns, floatfmt=".2f"))
    compared = {
        "worst_p50_ratio": max(p50 for p50, _ in ratios.values()),
        "worst_p99_ratio": max(p99 for _, p99 in ratios.values()),
    }
    figures = {
        "aim_ratio": 2,
        "ratios_p50_p99": ratios,
        "failed_requests": sum(row.failed for _, row in rows),
        "most_rss_mb": max(row.rss_mb for _, row in rows),
        "first_rss_mb": first_rss_mb,
        "seconds": round(time.monotonic() - began_s, 1),
    }
    finish("gateway_hostile", compared, figures)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
