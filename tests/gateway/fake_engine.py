"""A stand-in for an engine: a real HTTP server that behaves as its script says, also badly.

The real engine meets the gateway in the end-to-end tests; what this one adds is dying on cue.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import orjson

Script = Callable[["Call"], Awaitable[None]]


@dataclass
class Call:
    """One request, and the means to answer it."""

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
    """Listens on a port of its own; `script` may be changed at any time."""

    replica: str
    script: Script
    port: int = 0
    calls: list[Call] = field(default_factory=list)
    abandoned: int = 0
    """Connections that the other side closed in the middle of an answer."""
    connections: int = 0
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """End as kill -9 does: no goodbye on any connection."""
        if self._server is None:
            return
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        self._server = None
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines if line)
        body = await reader.readexactly(int(headers["content-length"]))
        call = Call(self, first.split(" ")[1], headers, body, writer)
        self.calls.append(call)
        async with asyncio.TaskGroup() as group:
            working = group.create_task(_quietly(self.script(call)))
            # Nobody sends a second request before the first is answered: more bytes are an end.
            watching = group.create_task(_gone(reader))
            await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                self.abandoned += 1
            working.cancel()
            watching.cancel()
        return not writer.is_closing()


async def _quietly(work: Awaitable[None]) -> None:
    try:
        await work
    except ConnectionError:
        return


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


def delta(text: str) -> bytes:
    body = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}],
    }
    return b"data: " + orjson.dumps(body) + b"\n\n"


def completion(text: str) -> bytes:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": "stop",
    }
    return orjson.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [choice],
        }
    )


DONE = b"data: [DONE]\n\n"


async def echo(call: Call) -> None:
    """Answer with the request's own body."""
    await call.answer(call.body)


async def chat(call: Call) -> None:
    """Answer as an engine does, streamed or not."""
    if not orjson.loads(call.body).get("stream"):
        await call.answer(completion(f"hello from {call.engine.replica}"))
        return
    await call.begin_stream()
    for word in ("hello", " from ", call.engine.replica):
        await call.chunk(delta(word))
    await call.chunk(DONE)
    await call.send(b"0\r\n\r\n")


async def dies_at_once(call: Call) -> None:
    call.die()


async def dies_after_the_head(call: Call) -> None:
    await call.begin_stream()
    await asyncio.sleep(0.02)
    call.die()


async def dies_in_the_first_event(call: Call) -> None:
    await call.begin_stream()
    await call.chunk(delta("never to be seen")[:20])
    await asyncio.sleep(0.02)
    call.die()


async def dies_mid_stream(call: Call) -> None:
    await call.begin_stream()
    await call.chunk(delta("one"))
    await call.chunk(delta("two") + delta("half")[:30])
    await asyncio.sleep(0.02)
    call.die()


async def dies_mid_answer(call: Call) -> None:
    body = completion("x" * 200)
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    await call.send(head.encode() + b"\r\n\r\n" + body[:100])
    await asyncio.sleep(0.02)
    call.die()


def refuses(status: int, code: str) -> Script:
    async def script(call: Call) -> None:
        body = orjson.dumps({"error": {"message": code, "type": "server_error", "code": code}})
        await call.answer(body, status, retry_after="1")

    return script


def slow(seconds: float, then: Script = chat) -> Script:
    async def script(call: Call) -> None:
        await asyncio.sleep(seconds)
        await then(call)

    return script


def streams(count: int, *, pause_s: float, size: int = 1) -> Script:
    async def script(call: Call) -> None:
        await call.begin_stream()
        for number in range(count):
            await call.chunk(delta(f"{number} " * size))
            await asyncio.sleep(pause_s)
        await call.chunk(DONE)
        await call.send(b"0\r\n\r\n")

    return script
