"""A gateway's process with a recording engine behind it, and how to talk to it byte by byte."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from store.etcd.connect import connect
from tests.gateway.hostile.recorder import Recorder, recording
from tests.gateway.world import World, deployment, endpoint, route
from tests.support.etcd import running_etcd
from tests.support.ports import free_port
from tests.support.waiting import until_async

BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
_PATIENCE_S = 20.0
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")


def post(body: bytes = BODY, *headers: bytes, path: bytes = b"/v1/chat/completions") -> bytes:
    """Return a sound request, with more headers."""
    lines = [b"POST %b HTTP/1.1" % path, b"host: gateway", b"content-type: application/json"]
    return b"\r\n".join([*lines, *headers, b"content-length: %d" % len(body), b"", body])


LAST = b"GET /health HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n\r\n"
"""Ends a connection, if it is heard as a request."""


@dataclass
class Stand:
    """The gateway and what is behind it."""

    port: int
    process: psutil.Process
    engine: Recorder
    elsewhere: Recorder
    """Listens, but was never published."""

    def rss(self) -> int:
        return int(self.process.memory_info().rss)

    @asynccontextmanager
    async def connection(
        self,
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def say(self, *pieces: bytes) -> bytes:
        """Send the pieces one by one on one connection; return all that comes back until its end."""
        async with self.connection() as (reader, writer), asyncio.timeout(_PATIENCE_S):
            try:
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
            except ConnectionError:
                pass  # refused before we were through; what was said is read below
            heard = b""
            try:
                while piece := await reader.read(1 << 16):
                    heard += piece
            except ConnectionError:
                pass
            return heard

    async def statuses(self, *pieces: bytes) -> list[int]:
        """Send the pieces; return the statuses of all answers."""
        return statuses(await self.say(*pieces))

    async def is_well(self) -> bool:
        """Return whether a sound request is answered, by the engine."""
        before = len(self.engine.requests)
        return await self.statuses(post() + LAST) == [200, 200] and (
            len(self.engine.requests) == before + 1
        )


def statuses(heard: bytes) -> list[int]:
    """Return the statuses of the answers in what was heard."""
    return [int(found) for found in _STATUS.findall(heard)]


@asynccontextmanager
async def standing(folder: Path) -> AsyncIterator[Stand]:
    """Start everything; the model is `m`, and `alias` is another name for it."""
    async with AsyncExitStack() as stack:
        etcd = await stack.enter_async_context(running_etcd(folder))
        engine = await stack.enter_async_context(recording())
        elsewhere = await stack.enter_async_context(recording())
        transport = connect(etcd.address)
        endpoints = [
            endpoint(f"m-{ordinal}", "m", f"http://127.0.0.1:{port}")
            for ordinal, port in enumerate(engine.ports)
        ]
        alias = route("alias", "alias", m=1)
        await World(transport).put(deployment("m", replicas=2), alias, *endpoints)
        await transport.close()
        port = free_port()
        flags = ("--port", str(port), "--etcd", str(etcd.address), "--log-level", "error")
        child = await asyncio.create_subprocess_exec(sys.executable, "-m", "gateway", *flags)
        try:
            made = Stand(port, psutil.Process(child.pid), engine, elsewhere)

            async def ready() -> bool:
                try:
                    return await made.is_well()
                except OSError:
                    return False

            await until_async(ready, what="the gateway")
            yield made
            assert child.returncode is None, "the gateway did not survive"
        finally:
            if child.returncode is None:
                child.kill()
            await child.wait()
