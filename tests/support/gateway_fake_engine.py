"""A fake engine: a real HTTP server that follows a script.

End-to-end tests use real engines; this one can die on cue.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from machinery.engine_link import EngineGauges
from tests.support import link_server

Script = Callable[["Call"], Awaitable[None]]


@dataclass
class Call:
    """One request, and the methods to answer it."""

    engine: "FakeEngine"
    path: str
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(
        self, body: bytes, status: int = 200, kind: str = "application/json", **more: str
    ) -> None:
        lines = [f"HTTP/1.1 {status} Whatever", *self._stamp(kind), f"content-length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in more.items()]
        await self.send("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    async def begin_stream(self, *, is_chunked: bool = True) -> None:
        lines = ["HTTP/1.1 200 OK", *self._stamp("text/event-stream; charset=utf-8")]
        lines.append("transfer-encoding: chunked" if is_chunked else "connection: close")
        await self.send("\r\n".join(lines).encode() + b"\r\n\r\n")

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    def die(self) -> None:
        self.writer.transport.abort()

    def _stamp(self, kind: str) -> list[str]:
        replica = self.engine.replica
        return [f"content-type: {kind}", f"x-fleet-replica: {replica}", "x-fleet-queued: 7"]


@dataclass
class FakeEngine:
    """Listens on its own port; `script` may be changed at any time."""

    replica: str
    script: Script
    port: int = 0
    path: Path | None = None
    """Listens on this socket instead."""
    calls: list[Call] = field(default_factory=list)
    abandoned: int = 0
    """Connections that the other side closed during a response."""
    connections: int = 0
    """HTTP connections, of which each request of a link is one, and links."""
    links: int = 0
    health: int | None = 200
    """Status of GET /health; only 200 is ready. None: no answer, as of a process that was stopped after its first link."""
    probes: int = 0
    """The number of health checks."""
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def start(self) -> None:
        if self.path is not None:
            self._server = await asyncio.start_unix_server(self._serve, self.path)
            return
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """End like kill -9: connections are not closed properly."""
        if self._server is None:
            return
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        self._server = None
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None:  # killed after it accepted this connection
            writer.transport.abort()
            return
        self.connections += 1
        self._writers.add(writer)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    def _report(self) -> EngineGauges | None:
        self.probes += 1
        if self.health is None:
            return None
        is_ready = self.health == 200
        return EngineGauges(replica=self.replica, is_ready=is_ready, in_flight=0, queued=0)

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines if line)
        if link_server.is_upgrade(first):
            self.links += 1
            is_answered = self.health is not None or self.links == 1
            await link_server.serve_link(
                reader, writer, self._serve, gauges=self._report, is_answered=is_answered
            )
            return False
        if first.startswith("GET /health"):
            self.probes += 1
            await (_stopped if self.health is None else _health)(Call(self, "", {}, b"", writer))
            return False
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        call = Call(self, first.split(" ")[1], headers, body, writer)
        self.calls.append(call)
        async with asyncio.TaskGroup() as group:
            working = group.create_task(_finished(self.script(call)))
            # No client sends a second request before the first response, so more bytes mean the
            # end.
            watching = group.create_task(_gone(reader))
            await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
            if not working.done() or not working.result():
                self.abandoned += 1
            working.cancel()
            watching.cancel()
        return not writer.is_closing()


async def _health(call: Call) -> None:
    await call.answer(b"{}", call.engine.health or 200)


async def _stopped(_: Call) -> None:
    await asyncio.Event().wait()


async def _finished(work: Awaitable[None]) -> bool:
    """Run the script; return whether the other side let it finish."""
    try:
        await work
    except ConnectionError:
        return False
    return True


async def _gone(reader: asyncio.StreamReader) -> None:
    while not reader.at_eof():  # noqa: ASYNC110 - a StreamReader has no event for its end
        await asyncio.sleep(0.005)


@asynccontextmanager
async def running(engine: FakeEngine) -> AsyncIterator[FakeEngine]:
    await engine.start()
    try:
        yield engine
    finally:
        await engine.kill()
