"""A gateway process with a recording engine, and raw connections to it."""

import asyncio
import re
import resource
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from store.etcd.connect import connect
from tests.support.etcd import running_etcd
from tests.support.gateway_calls import put_api_key
from tests.support.gateway_recording_engine import Recorder, recording
from tests.support.gateway_world import World, deployment, endpoint, route
from tests.support.ports import free_port
from tests.support.store_certificates import Authority
from tests.support.waiting import until_async

BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
_PATIENCE_S = 20.0
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")


def post(body: bytes = BODY, *headers: bytes, path: bytes = b"/v1/chat/completions") -> bytes:
    """Return a valid request with further headers."""
    lines = [b"POST %b HTTP/1.1" % path, b"host: localhost", b"content-type: application/json"]
    return b"\r\n".join([*lines, *headers, b"content-length: %d" % len(body), b"", body])


LAST = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
"""A request that ends the connection, if it is parsed as one."""


@dataclass
class Stand:
    """The gateway process and its engine."""

    port: int
    process: psutil.Process
    engine: Recorder
    elsewhere: Recorder
    """Listens, but was never published."""
    log: Path
    """The gateway's warnings and errors."""
    key: str = ""
    """The API key that requests need; empty if they need none."""
    tls: ssl.SSLContext | None = None
    """Trusts the gateway's certificate; None if it serves plain HTTP."""

    def rss(self) -> int:
        return int(self.process.memory_info().rss)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=self.tls)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def say(self, *pieces: bytes) -> bytes:
        """Send the pieces one by one on one connection; return everything that comes back."""
        async with self.connection() as (reader, writer), asyncio.timeout(_PATIENCE_S):
            try:
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
            except ConnectionError:
                pass  # refused before all was sent; the response is read below
            received = b""
            try:
                while piece := await reader.read(1 << 16):
                    received += piece
            except ConnectionError:
                pass
            return received

    async def statuses(self, *pieces: bytes) -> list[int]:
        """Send the pieces; return the statuses of all responses."""
        return statuses(await self.say(*pieces))

    async def is_well(self) -> bool:
        """Return whether the engine answers a valid request."""
        before = len(self.engine.requests)
        key = [b"authorization: Bearer %b" % self.key.encode()] if self.key else []
        return await self.statuses(post(BODY, *key) + LAST) == [200, 200] and (
            len(self.engine.requests) == before + 1
        )


def statuses(received: bytes) -> list[int]:
    """Return the statuses of all responses in the bytes."""
    return [int(found) for found in _STATUS.findall(received)]


def _limit_files(count: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))


@asynccontextmanager
async def running_stand(
    folder: Path,
    *flags: str,
    files: int = 0,
    key: str = "",
    authority: Authority | None = None,
    context_length: int = 1 << 17,
) -> AsyncIterator[Stand]:
    """Start everything; the model is `m`, with the alias `alias`.

    `flags`: further flags of the gateway; `files`: its limit of open files; `key`: an API key of the fleet, which
    requests need; `authority`: it issues a certificate `gateway` for HTTPS; `context_length`: of the model, which by default takes
    bodies of 8 MiB.
    """
    tls = None
    if authority is not None:
        files_ = authority.issue("gateway")
        flags = (*flags, "--tls-cert", str(files_.certificate), "--tls-key", str(files_.key))
        tls = ssl.create_default_context(cafile=authority.certificate)
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
        world = World(transport)
        await world.put(
            deployment("m", replicas=2, context_length=context_length), alias, *endpoints
        )
        if key:
            await put_api_key(world, key)
            flags = (*flags, "--auth", "on")
        await transport.close()
        port, log = free_port(), folder / "gateway.log"
        flags = ("--port", str(port), "--etcd", str(etcd.address), "--log-level", "warning", *flags)
        with log.open("wb") as stderr:
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gateway", *flags),
                stderr=stderr,
                preexec_fn=partial(_limit_files, files) if files else None,
            )
        try:
            made = Stand(port, psutil.Process(child.pid), engine, elsewhere, log, key, tls)

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
