"""An engine that records every byte, and a socket that must never be connected to."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tests.support import link_server
from tests.support.tcp_server import tcp_server

_ANSWER = b'{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[]}'
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n"
_EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % (b"x" * 4000)
_DONE = b"data: [DONE]\n\n"
# The gateway's health checks are not recorded.
_PROBE = b"GET /"
_TOO_LARGE = b"HTTP/1.1 413 Content Too Large\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
SILENT = b'"silent"'
"""A prompt with this text gets no answer."""
ENDLESS = b'"endless"'
"""A prompt with this text gets events for as long as they are read."""


@dataclass(frozen=True)
class Request:
    """One request as it arrived."""

    head: bytes
    body: bytes


@dataclass
class Recorder:
    """Listens on two ports, as two engines, and answers every valid request."""

    ports: tuple[int, ...] = ()
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    leftover: bytes = b""
    """Bytes on a connection that are not a request."""
    streamed_bytes: int = 0
    most_body: int = 1 << 30
    """Longer bodies are refused unread, as by an engine with a small context."""
    silent: int = 0
    """The number of requests that wait for an answer."""
    streaming: int = 0
    """The number of endless streams being read."""

    def clear(self) -> None:
        self.requests.clear()
        self.leftover, self.streamed_bytes = b"", 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if link_server.is_upgrade(head):
                    await link_server.serve_link(reader, writer, self.serve)
                    return
                if _length(head) > self.most_body:
                    writer.write(_TOO_LARGE)
                    await asyncio.sleep(0.5)
                    writer.transport.abort()
                    return
                body = await reader.readexactly(_length(head))
                if SILENT in body:
                    self.silent += 1
                    await reader.read()
                    self.silent -= 1
                    return
                if not head.startswith(_PROBE):
                    self.requests.append(Request(head, body))
                await (self._endless(writer) if ENDLESS in body else self._answer(writer, body))
        except asyncio.IncompleteReadError as error:
            self.leftover += error.partial

    async def _answer(self, writer: asyncio.StreamWriter, body: bytes) -> None:
        if b'"stream":true' in body:
            writer.write(_HEAD % b"text/event-stream" + b"transfer-encoding: chunked\r\n\r\n")
            writer.write(_framed(_EVENT) + _framed(_DONE) + b"0\r\n\r\n")
        else:
            length = b"content-length: %d\r\n\r\n" % len(_ANSWER)
            writer.write(_HEAD % b"application/json" + length + _ANSWER)
        await writer.drain()

    async def _endless(self, writer: asyncio.StreamWriter) -> None:
        writer.write(_HEAD % b"text/event-stream" + b"transfer-encoding: chunked\r\n\r\n")
        self.streaming += 1
        try:
            while True:
                writer.write(_framed(_EVENT))
                await writer.drain()
                self.streamed_bytes += len(_EVENT)
        finally:
            self.streaming -= 1


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        name, _, value = line.partition(b": ")
        if name == b"content-length":
            return int(value)
    return 0


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@asynccontextmanager
async def recording() -> AsyncIterator[Recorder]:
    recorder = Recorder()
    async with tcp_server(recorder.serve) as first, tcp_server(recorder.serve) as second:
        recorder.ports = (first, second)
        yield recorder
