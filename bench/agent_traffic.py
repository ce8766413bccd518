"""Bytes between one agent and etcd while nothing changes: `make bench-agent-traffic`, eleven minutes (MINUTES=60: an hour).

A real etcd, a real `fleet-nodeagent`, and a relay between them that counts every byte of the socket and adds it to the
HTTP/2 stream of its frame: watches, renewals of the lease, other calls, and what belongs to no stream. A leader keeps
what agents watch. The last line is one JSON object, ratios first.
"""

import asyncio
import os
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.agent_caches import keeping_copies
from bench.result import finish, sized
from machinery.clock import SystemClock
from store import keys
from store.etcd.connect import connect
from store.etcd.member.binary import locate
from store.etcd.member.embedded import EmbeddedEtcd
from store.port import Transport

# etcd reports the progress of a watch every five minutes, so a shorter time would show none.
MINUTES = float(os.environ.get("MINUTES", sized("10.5", smoke="0.1")))
SETTLE_S = sized(30.0, smoke=2.0)
AIM_KB_AN_HOUR: Final = 20.0
_CLOCK = SystemClock()
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADER_BYTES: Final = 9
_HEADERS: Final = 1
# The streams of an agent that stay open.
_PATHS: Final = {b"/etcdserverpb.Watch/Watch": "watches", b"LeaseKeepAlive": "renewals"}


@dataclass
class Tally:
    """Bytes by the purpose of their stream, of all connections."""

    sent: Counter[str] = field(default_factory=Counter)
    """By the agent."""
    received: Counter[str] = field(default_factory=Counter)
    """By the agent."""


class Frames:
    """Finds the frames in one direction of a connection. RFC 9113, section 4.1."""

    def __init__(self, purposes: dict[int, str], count: Counter[str], *, is_client: bool) -> None:
        """`purposes` are those of the connection's streams, which the client's direction fills."""
        self._purposes = purposes
        self._count = count
        self._is_client = is_client
        self._rest = b""
        self._has_preface = not is_client

    def feed(self, data: bytes) -> None:
        """Count the whole frames."""
        self._rest += data
        if not self._has_preface and len(self._rest) >= len(_PREFACE):
            assert self._rest.startswith(_PREFACE), "not HTTP/2"
            self._take("connection", len(_PREFACE))
            self._has_preface = True
        while self._has_preface and len(self._rest) >= _HEADER_BYTES:
            size = _HEADER_BYTES + int.from_bytes(self._rest[:3], "big")
            if len(self._rest) < size:
                return
            stream = int.from_bytes(self._rest[5:9], "big") & 0x7FFFFFFF
            if self._is_client and self._rest[3] == _HEADERS:
                # gRPC's client writes a path in clear the first time, and these streams are opened once.
                head = self._rest[:size]
                found = next((name for path, name in _PATHS.items() if path in head), "calls")
                self._purposes[stream] = found
            self._take(self._purposes.get(stream, "calls") if stream else "connection", size)

    def _take(self, purpose: str, size: int) -> None:
        self._count[purpose] += size
        self._rest = self._rest[size:]


@asynccontextmanager
async def relay(path: Path, etcd: Path, tally: Tally) -> AsyncIterator[None]:
    """Relay connections of one Unix socket to another one, and count."""
    tasks: set[asyncio.Task[None]] = set()

    async def pump(
        source: asyncio.StreamReader, sink: asyncio.StreamWriter, frames: Frames
    ) -> None:
        while data := await source.read(2**16):
            frames.feed(data)
            sink.write(data)
            await sink.drain()
        sink.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_unix_connection(etcd)
        purposes: dict[int, str] = {}
        for source, sink, count in (
            (reader, there[1], tally.sent),
            (there[0], writer, tally.received),
        ):
            frames = Frames(purposes, count, is_client=source is reader)
            tasks.add(asyncio.create_task(pump(source, sink, frames)))

    server = await asyncio.start_unix_server(serve, path)
    try:
        yield
    finally:
        server.close()
        for task in tasks:
            task.cancel()


@asynccontextmanager
async def agent(folder: Path, socket: Path) -> AsyncIterator[None]:
    """Run a real agent until the block ends."""
    with (folder / "agent.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "nodeagent", "--etcd", f"unix:{socket}"),
            *("--name", "node-0", "--memory", "1Gi", "--api-port", "0"),
            *("--state-dir", str(folder / "state"), "--models-dir", str(folder / "models")),
            stdout=log,
            stderr=log,
        )
        try:
            yield
            assert process.returncode is None, (folder / "agent.log").read_text()[-2000:]
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def measure(folder: Path) -> dict[str, dict[str, float]]:
    """Return the kilobytes an hour by direction and purpose."""
    etcd, tally, socket = (
        EmbeddedEtcd(locate(None), folder / "etcd", _CLOCK),
        Tally(),
        folder / "relay",
    )
    await etcd.start()
    assert etcd.address.socket is not None
    transport = connect(etcd.address)
    try:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(keeping_copies(transport))
            await stack.enter_async_context(relay(socket, etcd.address.socket, tally))
            await stack.enter_async_context(agent(folder, socket))
            await _until_registered(transport)
            await asyncio.sleep(SETTLE_S)
            before = Tally(Counter(tally.sent), Counter(tally.received))
            await asyncio.sleep(MINUTES * 60)
            hours = MINUTES / 60
            return {
                direction: {
                    purpose: (count - then[purpose]) / hours / 1000
                    for purpose, count in sorted(now.items())
                }
                for direction, now, then in (
                    ("sent", tally.sent, before.sent),
                    ("received", tally.received, before.received),
                )
            }
    finally:
        await transport.close()
        await etcd.supervisor.stop()


async def _until_registered(transport: Transport) -> None:
    async with asyncio.timeout(60):
        while await transport.get(keys.status_key("Node", "node-0")) is None:
            await asyncio.sleep(0.1)


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(Path(folder)))
    for direction, by_purpose in found.items():
        rounded = {purpose: round(kb, 1) for purpose, kb in by_purpose.items()}
        print(f"{direction}, kB an hour: {rounded}", flush=True)
    watches = sum(by_purpose.get("watches", 0.0) for by_purpose in found.values())
    total = sum(sum(by_purpose.values()) for by_purpose in found.values())
    finish(
        "agent-traffic",
        {"watches_of_aim": round(watches / AIM_KB_AN_HOUR, 2)},
        {
            "watches_kb_an_hour": round(watches, 1),
            "all_kb_an_hour": round(total, 1),
            "minutes": MINUTES,
            **{way: {name: round(kb, 1) for name, kb in one.items()} for way, one in found.items()},
        },
    )


if __name__ == "__main__":
    main()
