"""A gateway's side of the engine link on a plain socket, for tests of engines: frame by frame, without limits."""

import json
import os
import select
import socket
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from machinery import engine_link
from machinery.engine_link import EngineGauges, Failure, FrameReader, RequestHead

UPGRADE = b"POST /v1/link HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: fleet-link\r\n%b\r\n"
JSON_LINE = b"content-type: application/json\r\n"


class LinkClient:
    """One open link; what has arrived for each stream is kept until it is asked for."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.reader = FrameReader(engine_link.MAX_RESPONSE_PAYLOAD)
        self.frames: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
        self.reads: list[int] = []
        """The number of frames of each read."""
        self.is_closed = False

    def send(self, stream: int, kind: int, payload: bytes = b"") -> None:
        self.connection.sendall(engine_link.frame(stream, kind, payload))

    def request(
        self, stream: int, path: str, body: bytes, *, lines: bytes = JSON_LINE, method: str = "POST"
    ) -> None:
        head = RequestHead(method, path, lines, len(body))
        first, rest = body[: engine_link.BODY_BYTES], body[engine_link.BODY_BYTES :]
        self.send(stream, engine_link.REQUEST, engine_link.encode_request(head, first))
        for at in range(0, len(rest), engine_link.BODY_BYTES):
            self.send(stream, engine_link.BODY, rest[at : at + engine_link.BODY_BYTES])

    def chat(self, number: int, /, *, lines: bytes = JSON_LINE, **fields: Any) -> None:
        messages = [{"role": "user", "content": "hello"}]
        body = {"model": "tiny", "messages": messages, "temperature": 0} | fields
        self.request(number, "/v1/chat/completions", json.dumps(body).encode(), lines=lines)

    def read(self) -> None:
        """Take what has arrived, or wait for it."""
        data = self.connection.recv(1 << 20)
        if not data:
            self.is_closed = True
            return
        frames = self.reader.feed(data)
        self.reads.append(len(frames))
        for stream, kind, payload in frames:
            self.frames[stream].append((kind, payload))

    def wait(self, stream: int, *kinds: int) -> None:
        """Read until the stream has a frame of one of these kinds."""
        while not self.is_closed and not any(kind in kinds for kind, _ in self.frames[stream]):
            self.read()

    def response(self, stream: int) -> tuple[int, dict[bytes, bytes], bytes]:
        """Return status, headers and body of a response, of which everything has arrived or does."""
        self.wait(stream, engine_link.END, engine_link.FAIL)
        frames = self.frames[stream]
        assert frames[-1][0] == engine_link.END, frames
        head = engine_link.decode_status(
            next(payload for kind, payload in frames if kind == engine_link.STATUS)
        )
        data = (engine_link.EVENTS, engine_link.END)
        recorded = b"".join(events for _, events in self.recorded(stream))
        body = recorded + b"".join(payload for kind, payload in frames if kind in data)
        return head.status, dict(engine_link.split_lines(head.lines)), body

    def recorded(self, stream: int) -> list[tuple[bytes, bytes]]:
        """Return the resume records of a stream so far, with the events beside each."""
        pairs, begun = [], b""
        for kind, payload in self.frames[stream]:
            if kind == engine_link.RECORDED_PART:
                begun += payload
            elif kind == engine_link.RECORDED:
                pairs.append(engine_link.split_recorded(begun + payload))
                begun = b""
        return pairs

    def gauges(self) -> EngineGauges:
        """Ask for the load of the engine."""
        self.frames.pop(0, None)
        self.send(0, engine_link.PING)
        self.wait(0, engine_link.GAUGES)
        return engine_link.decode_gauges(self.frames[0][-1][1])


@dataclass(frozen=True)
class RecordedReply:
    """A response over a link."""

    status: int
    raw: bytes
    frames: list[tuple[bytes, bytes]]
    """Resume records with the events beside each."""
    failure: Failure | None = None


def ask(port: int, path: str, body: bytes, lines: bytes = b"") -> RecordedReply:
    """Ask an engine for an answer that can be continued."""
    with linked(port) as link:
        link.request(1, path, body, lines=JSON_LINE + b"x-fleet-resumable: 1\r\n" + lines)
        link.send(1, engine_link.WINDOW, engine_link.encode_window(1 << 26))
        link.wait(1, engine_link.END, engine_link.FAIL)
        kind, payload = link.frames[1][-1]
        if kind == engine_link.FAIL:
            failure = engine_link.decode_failure(payload)
            return RecordedReply(200, b"", link.recorded(1), failure)
        status, _, raw = link.response(1)
        return RecordedReply(status, raw, link.recorded(1))


def upgrade(port: int, more: bytes = b"") -> tuple[socket.socket, bytes]:
    """Return a connection on which a link was asked for, and the head of the answer."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection.sendall(UPGRADE % more)
    head = b""
    while not head.endswith(b"\r\n\r\n") and (byte := connection.recv(1)):
        head += byte
    return connection, head


def send_all(descriptor: int, data: bytes) -> None:
    """Write to a socket that does not block, from a thread."""
    rest = memoryview(data)
    while rest:
        select.select([], [descriptor], [])
        with suppress(BlockingIOError):
            rest = rest[os.write(descriptor, rest) :]


@contextmanager
def linked(port: int) -> Iterator[LinkClient]:
    """Yield an open link to the engine at the port."""
    connection, head = upgrade(port)
    with connection:
        assert head == engine_link.SWITCHING, head
        yield LinkClient(connection)
