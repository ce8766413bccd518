"""An engine's side of the engine link for stand-ins of engines: each stream is an HTTP connection to the stand-in.

The stand-in serves HTTP as real engines do for people, with resume records as comments (resume_records.py), and need not
know of the link:

    if is_upgrade(head):
        await serve_link(reader, writer, self.serve, gauges=...)
"""

import asyncio
import contextlib
import re
import socket
from collections.abc import Awaitable, Callable

import orjson

from machinery import engine_link
from machinery.engine_link import EngineGauges, Failure, FrameReader, RequestHead, StatusHead
from tests.support.resume_records import CommentReader, record_of

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[object]]
Gauges = Callable[[], EngineGauges | None]
"""Returns what the engine reports; None: it answers no probe, as a process that was stopped after the link was open."""
_STATUS = re.compile(rb"HTTP/1\.1 (\d\d\d)[^\r\n]*\r\n")
_LOAD = (b"x-fleet-in-flight", b"x-fleet-queued", b"x-fleet-memory-free", b"x-fleet-kv-used")


def is_upgrade(head: bytes | str) -> bool:
    """Return whether a request is that for a link."""
    text = head if isinstance(head, str) else head.decode("latin-1")
    return text.startswith(f"POST {engine_link.PATH} ")


def any_replica() -> EngineGauges:
    """Return the report of an engine that may be any replica."""
    return EngineGauges(replica="", is_ready=True, in_flight=0, queued=0)


async def serve_link(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    serve: Serve,
    *,
    gauges: Gauges = any_replica,
    is_answered: bool = True,
) -> None:
    """Serve a link after the head of its request, until it ends; `serve` answers a connection with one request.

    `is_answered`: False answers nothing at all.
    """
    if not is_answered:
        await reader.read()
        return
    first = gauges() or any_replica()
    writer.write(engine_link.SWITCHING)
    frames = FrameReader(engine_link.MAX_REQUEST_PAYLOAD)
    try:
        async with asyncio.TaskGroup() as group:
            link = _Link(writer, serve, group)
            link.send(0, engine_link.GAUGES, engine_link.encode_head(first))
            # A gateway that is killed resets the connection, which ends the link like its end of file.
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(1 << 16):
                    for number, kind, payload in frames.feed(data):
                        if kind == engine_link.PING:
                            report = gauges()
                            if report is not None:
                                link.send(0, engine_link.GAUGES, engine_link.encode_head(report))
                        else:
                            await link.take(number, kind, payload)
            for stream in tuple(link.streams.values()):
                stream.task.cancel()
    finally:
        writer.close()


class _Link:
    def __init__(
        self, writer: asyncio.StreamWriter, serve: Serve, group: asyncio.TaskGroup
    ) -> None:
        self.writer = writer
        self.serve = serve
        self.group = group
        self.streams: dict[int, _Stream] = {}

    def send(self, number: int, kind: int, payload: bytes) -> None:
        self.writer.write(engine_link.frame(number, kind, payload))

    async def serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Let the stand-in serve a connection, which ends when its stream is cancelled."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await self.serve(reader, writer)

    async def take(self, number: int, kind: int, payload: bytes) -> None:
        stream = self.streams.get(number)
        if kind == engine_link.REQUEST:
            head, body = engine_link.decode_request(payload)
            stream = self.streams[number] = _Stream(self, number)
            await stream.open(head, body)
        elif stream is None:
            return
        elif kind == engine_link.BODY:
            stream.writer.write(payload)
        elif kind == engine_link.WINDOW:
            stream.window += engine_link.decode_window(payload)
            stream.granted.set()
        elif kind == engine_link.CANCEL:
            stream.task.cancel()


class _Stream:
    """One request, as an HTTP connection to the stand-in."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    task: asyncio.Task[None]

    def __init__(self, link: _Link, number: int) -> None:
        self.link = link
        self.number = number
        self.window = engine_link.WINDOW_BYTES
        self.granted = asyncio.Event()
        self.comments = CommentReader()

    async def open(self, head: RequestHead, body: bytes) -> None:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)
        self.reader, self.writer = await asyncio.open_connection(sock=ours)
        their_reader, their_writer = await asyncio.open_connection(sock=theirs)
        if b'"fleet":' in body:
            self.comments = CommentReader(orjson.loads(body)["fleet"].get("events", 0))
        first = f"{head.method} {head.path} HTTP/1.1\r\nhost: localhost\r\n".encode()
        length = b"content-length: %d\r\n" % head.body_bytes
        self.writer.write(first + length + head.lines + b"\r\n" + body)
        # Callbacks, because a task that is cancelled before its first step runs nothing.
        self.task = self.link.group.create_task(self._run())
        self.task.add_done_callback(lambda _: self._end())
        serving = self.link.group.create_task(self.link.serve_one(their_reader, their_writer))
        serving.add_done_callback(lambda _: their_writer.close())

    async def _run(self) -> None:
        try:
            await self._relay()
        except (ConnectionError, asyncio.IncompleteReadError, ValueError) as error:
            failure = Failure(f"the connection was lost: {error}")
            self.link.send(self.number, engine_link.FAIL, engine_link.encode_head(failure))

    def _end(self) -> None:
        """End the stand-in's connection, which it sees."""
        self.link.streams.pop(self.number, None)
        self.writer.transport.abort()

    async def _relay(self) -> None:
        while True:
            raw = await self.reader.readuntil(b"\r\n\r\n")
            match = _STATUS.match(raw)
            if match is None:
                raise ValueError("no HTTP")
            lines = raw[match.end() : -2]
            pairs = engine_link.split_lines(lines)
            fields = {name.lower(): value for name, value in pairs}
            if int(match[1]) >= 200:
                break
            resume = fields.get(b"x-fleet-resume")
            record = b"" if resume is None else record_of(orjson.loads(resume))
            self.link.send(self.number, engine_link.PROGRESS, record)
        self._report(fields)
        status = StatusHead(int(match[1]), engine_link.header_lines(list(fields.items())))
        self.link.send(self.number, engine_link.STATUS, engine_link.encode_head(status))
        if fields.get(b"transfer-encoding") == b"chunked":
            await self._chunks()
        elif b"content-length" in fields:
            await self._sized(int(fields[b"content-length"]))
        else:
            while data := await self.reader.read(16 << 10):
                await self._events(data)
        self.link.send(self.number, engine_link.END, b"")

    def _report(self, fields: dict[bytes, bytes]) -> None:
        running, queued, free, used = (fields.get(name) for name in _LOAD)
        if running is None or queued is None:
            return
        gauges = EngineGauges(
            replica=fields.get(b"x-fleet-replica", b"").decode(),
            is_ready=True,
            in_flight=int(running),
            queued=int(queued),
            memory_free=None if free is None else int(free) / 100,
            kv_used=None if used is None else int(used) / 1e6,
        )
        self.link.send(0, engine_link.GAUGES, engine_link.encode_head(gauges))

    async def _chunks(self) -> None:
        while size := int((await self.reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            await self._sized(size)
            if await self.reader.readexactly(2) != b"\r\n":
                raise ValueError("no chunk")
        await self.reader.readuntil(b"\r\n")

    async def _sized(self, size: int) -> None:
        while size:
            data = await self.reader.read(min(size, 16 << 10))
            if not data:
                raise ValueError("the body is not complete")
            size -= len(data)
            await self._events(data)

    async def _events(self, data: bytes) -> None:
        while self.window <= 0:
            self.granted.clear()
            await self.granted.wait()
        for kind, payload in self.comments.feed(data):
            self.window -= len(payload)
            self.link.send(self.number, kind, payload)
            if kind == engine_link.FAIL:
                self.task.cancel()
        await self.link.writer.drain()
