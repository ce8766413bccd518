"""One HTTP/1.1 connection to an external server: it parses the responses and hands them to the call that it carries.

No task and no future: each read of the socket calls the receiver of the response directly. Heads are read line by line:
nearly every line was seen before. The parser takes a strict part of HTTP/1.1. A head that says two things about the length
of its body is refused: what follows could be taken for the response to another request.
"""

import asyncio
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from typing import cast

from typing_extensions import override

from gateway.upstream.call import BrokenResponseError, EngineCall
from gateway.upstream.response_head import (
    CONNECTION,
    CONTENT_LENGTH,
    SHORT_LIMIT_S,
    TRANSFER_ENCODING,
    UNTIL_CLOSE,
    InvalidResponseError,
    ResponseHead,
    SeenLines,
    read_head,
    read_header,
)
from machinery.clock import NEVER, Clock
from machinery.http_server import MAX_HEAD_BYTES
from schemas.wire.connections import POOL_IDLE_S
from schemas.wire.engine_address import EngineAddress

_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9]\d\d)(?: [\t\x20-\x7e\x80-\xff]*)?")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?")
_BODILESS = frozenset({204, 304})
# Names that must not come twice.
_SINGLE = frozenset({CONTENT_LENGTH, TRANSFER_ENCODING})
_BEGINNING = b"HTTP/1."
# A chunk's size with its extensions. Engines send no extensions.
_LONGEST_SIZE_LINE = 1024
_LINE_END = b"\r\n"
_SWITCHING = 101
_MOST_TRAILERS = 100
# What the next bytes of a connection belong to.
_IDLE, _HEAD, _SIZED, _CHUNKS, _UNTIL_CLOSE = range(5)


def _read_status_line(line: bytes) -> tuple[int, bool]:
    """Return the status, and whether the version keeps connections open by default."""
    match = _STATUS_LINE.fullmatch(line)
    if match is None:
        raise InvalidResponseError("no status line")
    return int(match[2]), match[1] == b"1"


def _read_chunk_size(line: bytes) -> int:
    match = _CHUNK_SIZE.fullmatch(line)
    if match is None:
        raise InvalidResponseError("an invalid chunk size")
    return int(match[1], 16)


_STATUS_LINES = SeenLines(_read_status_line)
_CHUNK_SIZES = SeenLines(_read_chunk_size)
"""The size of a chunk by the line before it."""


def _read_chunk_beginning(data: bytes) -> tuple[int, int]:
    """Return where a chunk's content begins and where the chunk ends, if its first bytes tell; (0, 0) if not."""
    at = data.find(b"\r\n")
    match = _CHUNK_SIZE.fullmatch(data[:at]) if at > 0 else None
    size = 0 if match is None else int(match[1], 16)
    return (at + 2, at + size + 4) if size else (0, 0)


_CHUNK_BEGINNING = 5
_CHUNK_BEGINNINGS = SeenLines(_read_chunk_beginning)
"""Begin of a chunk's content and end of the chunk, by its first _CHUNK_BEGINNING bytes: most have up to 3 digits."""


def parse_head(data: bytes) -> ResponseHead:
    """Return the head in these bytes, given without the empty line at its end.

    Raises:
        InvalidResponseError: it is not a valid head.

    """
    first, *lines = data.split(b"\r\n")
    status, keeps_alive = _STATUS_LINES[first]
    head = read_head(status, lines)
    fields = head.fields
    if len(fields) < len(lines):
        names = [read_header(line)[0] for line in lines]
        for name in _SINGLE & fields.keys():
            if names.count(name) > 1:
                raise InvalidResponseError(f"more than one {name.decode('ascii')}")
    head.keeps_alive = keeps_alive and b"close" not in fields.get(CONNECTION, b"")
    head.is_chunked, text = TRANSFER_ENCODING in fields, fields.get(CONTENT_LENGTH)
    head.length = UNTIL_CLOSE if text is None else int(text)
    if status in _BODILESS:
        head.length, head.is_chunked = 0, False
    elif head.is_chunked and text is not None:
        raise InvalidResponseError("a content-length together with chunks")
    return head


class KeptConnections(ABC):
    """The open connections to engines, which carry one call after another. Subclasses open them, and see them end."""

    def __init__(self, clock: Clock) -> None:
        self.idle: defaultdict[EngineAddress, list[Connection]] = defaultdict(list)
        """Connections without a call; the last one is used first."""
        self._now = clock.monotonic

    def send(self, call: EngineCall) -> None:
        """Send a request; its response, or the reason why there is none, goes to the call.

        Time limits are held to the second, or to 50 ms if they are less than 5 s ahead.
        """
        now_s, origin = self._now(), call.origin
        idle = self.idle.get(origin)
        while idle:
            connection = idle.pop()
            if connection.is_usable and connection.idle_since >= now_s - POOL_IDLE_S:
                if call.silence_s < SHORT_LIMIT_S or call.until_s < now_s + SHORT_LIMIT_S:
                    self.watch(connection)
                connection.start(call, now_s)
                return
            connection.cut()
        self.dial(call)

    @abstractmethod
    def dial(self, call: EngineCall) -> None:
        """Open a connection for a call."""

    @abstractmethod
    def watch(self, connection: "Connection") -> None:
        """Check a connection's time limits more often than once a second."""

    @abstractmethod
    def on_broken(
        self, connection: "Connection", call: EngineCall, error: BrokenResponseError
    ) -> None:
        """Handle a call whose response is missing or incomplete."""

    @abstractmethod
    def forget(self, connection: "Connection") -> None:
        """Handle the end of a connection."""


class Connection(asyncio.Protocol):
    """One connection. Its owner is told of its first bytes, its end, and of each call that breaks."""

    def __init__(self, clock: Clock, origin: EngineAddress, owner: KeptConnections) -> None:
        self.origin = origin
        self.is_usable = False
        self.idle_since = NEVER
        self.silent_since = NEVER
        """Time since which the engine owes the next byte; infinite if it owes none."""
        self.has_received = False
        """True if anything arrived since this was last reset."""
        self.is_reused = False
        """True once it has been idle: the engine may close it in the moment of the next request."""
        self.is_paused = False
        """True if reading is paused because the client is slow."""
        self._now: Callable[[], float] = clock.monotonic
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._call: EngineCall | None = None
        self._expects = _IDLE
        self._has_bytes = False
        """True once a byte of the response has arrived."""
        self._rest = b""
        """Bytes that wait for the rest of a head, or of a line between chunks."""
        self._left = 0
        """Missing bytes of the body, or of the chunk."""
        self._trailer_lines = 0
        """Lines after the last chunk; 0 before it."""
        self._is_within_chunk = False
        """True if the last read ended in a chunk, or in a line between chunks."""
        self._keeps_alive = False
        self._has_large = False
        """True if the body of the last request was written apart."""

    def start(self, call: EngineCall, now_s: float) -> None:
        """Send a request; its response goes to the call."""
        self.is_usable, self.idle_since = False, NEVER
        self._call, call.connection = call, self
        self._expects, self._has_bytes = _HEAD, False
        transport = self._transport
        if transport is None or transport.is_closing():
            self._break("the connection was closed")
        else:
            self.silent_since = now_s
            transport.write(call.raw)
            self._has_large = bool(call.body)
            if call.body:
                transport.write(call.body)

    def drop(self, call: EngineCall) -> None:
        """Give up the call's response, whose rest would be in the way of another."""
        if self._call is call:
            self._release()
            self.cut()

    def cut(self) -> None:
        """Close at once, so that the engine frees the request's slot."""
        self.is_usable = False
        if self._transport is not None:
            self._transport.abort()

    def fail(self, why: str, *, is_silence: bool) -> None:
        """Give the engine up."""
        if self._call is not None:
            self._break(why, is_silence=is_silence)
        self.cut()

    def fail_call(self, call: EngineCall, why: str, *, is_silence: bool) -> None:
        """End the call because its time is up."""
        if self._call is call:
            self.fail(why, is_silence=is_silence)

    def pause(self, _: EngineCall) -> None:
        """Stop reading; the engine owes nothing meanwhile."""
        if not self.is_paused and self._transport is not None:
            self.is_paused, self.silent_since = True, NEVER
            self._transport.pause_reading()

    def resume(self, _: EngineCall | None = None) -> None:
        """Read again."""
        if self.is_paused and self._transport is not None:
            self.is_paused, self.silent_since = False, self._now()
            self._transport.resume_reading()

    @property
    def silence_s(self) -> float:
        """The longest silence that is accepted, in seconds; infinite without a request."""
        return NEVER if self._call is None else self._call.silence_s

    @property
    def until_s(self) -> float:
        """The deadline of the request; infinite without one."""
        return NEVER if self._call is None else self._call.until_s

    @property
    def is_gone(self) -> bool:
        """True if nothing can be sent."""
        return self._transport is None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # No isinstance check: uvloop's transports do not inherit from it.
        self._transport = cast("asyncio.Transport", transport)

    @override
    def data_received(self, data: bytes) -> None:
        self.has_received = True
        call = self._call
        if call is None:
            # Input without a request must not become the response of the next one.
            self.cut()
            return
        expects = self._expects
        try:
            if expects == _HEAD:
                self._feed_head(call, data)
                return
            if not self.is_paused:
                self.silent_since = self._now()
            if expects == _CHUNKS:
                if not self._is_within_chunk:
                    # Nearly always exactly one chunk arrives.
                    begin, end = _CHUNK_BEGINNINGS[data[:_CHUNK_BEGINNING]]
                    if end == len(data) and data[-2:] == _LINE_END:
                        (call.receive or call.on_body)(data[begin:-2])
                        return
                self._feed_chunks(call, data)
            else:
                self._feed_body(call, data)
        except InvalidResponseError as error:
            self._break(f"not HTTP: {error}")

    @override
    def eof_received(self) -> bool:
        call = self._call
        if call is not None:
            if self._expects == _UNTIL_CLOSE:
                self._finish(call, b"", is_surplus=True)
            else:
                self._break("the engine closed the connection")
        return False

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.is_usable = False
        self._transport = None
        if self._call is not None:
            self._break(
                "the connection was lost" if exc is None else f"the connection was lost: {exc}"
            )
        self._owner.forget(self)

    def _feed_head(self, call: EngineCall, data: bytes) -> None:
        """Read the head, and what follows it."""
        self._has_bytes = True
        if self._rest:
            data, self._rest = self._rest + data, b""
        while True:
            end = data.find(b"\r\n\r\n")
            if end < 0 or end > MAX_HEAD_BYTES:
                self.silent_since = self._now()
                self._keep_head(data)
                return
            head = parse_head(data[:end])
            data = data[end + 4 :]
            if head.status >= 200:
                break
            if head.status == _SWITCHING:
                raise InvalidResponseError("an upgrade that was not asked for")
        if head.length != len(data):
            self.silent_since, self._keeps_alive = self._now(), head.keeps_alive
            call.raw = call.body = b""  # never sent again, and streams live long
            call.on_head(head)
            if self._call is call:
                self._begin_body(call, head, data)
            return
        # Nearly always all of a whole response arrives at once.
        call.connection = self._call = None
        self._expects, self.silent_since = _IDLE, NEVER
        if call.on_whole(head, data) and head.keeps_alive and not self._is_behind():
            self.is_usable = self.is_reused = True
            self.idle_since = self._now()
            self._owner.idle[self.origin].append(self)
        else:
            self.cut()

    def _begin_body(self, call: EngineCall, head: ResponseHead, data: bytes) -> None:
        """Read what came with the head."""
        if head.is_chunked:
            self._expects, self._left, self._trailer_lines = _CHUNKS, 0, 0
            self._is_within_chunk = False
            if data:
                self._feed_chunks(call, data)
            return
        self._expects = _UNTIL_CLOSE if head.length == UNTIL_CLOSE else _SIZED
        self._left = head.length
        if data or not head.length:
            self._feed_body(call, data)

    def _keep_head(self, data: bytes) -> None:
        """Keep the beginning of a head, unless it can be none."""
        if data[: len(_BEGINNING)] != _BEGINNING[: len(data)]:
            raise InvalidResponseError("no status line")
        if len(data) > MAX_HEAD_BYTES:
            self._break(f"the response's head is larger than {MAX_HEAD_BYTES} bytes")
        else:
            self._rest = data

    def _feed_body(self, call: EngineCall, data: bytes) -> None:
        """Read a body that has a length, or ends with the connection."""
        if self._expects == _UNTIL_CLOSE:
            call.on_body(data)
            return
        self._left -= len(data)
        if self._left > 0:
            call.on_body(data)
        elif self._left:
            self._finish(call, data[: self._left], is_surplus=True)
        else:
            self._finish(call, data)

    def _feed_chunks(self, call: EngineCall, data: bytes) -> None:
        """Read chunks. The parts of a read are handed over as one."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        pieces: list[bytes] = []
        try:
            end = self._read_chunks(data, pieces)
        except InvalidResponseError:
            if pieces:
                (call.receive or call.on_body)(b"".join(pieces))
            if self._call is call:
                raise
            return
        self._is_within_chunk = bool(self._rest or self._left or self._trailer_lines)
        if end >= 0:
            self._finish(call, b"".join(pieces), is_surplus=end < len(data))
        elif pieces:
            body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            (call.receive or call.on_body)(body)

    def _read_chunks(self, data: bytes, pieces: list[bytes]) -> int:
        """Add the chunks' content to the pieces; return where the body ends, or -1 if more follows.

        `_left` counts the line end after a chunk.

        Raises:
            InvalidResponseError: the framing is invalid.

        """
        at, size = 0, len(data)
        if self._left:
            at = self._read_rest(data, pieces)
        while at < size:
            end = data.find(b"\r\n", at, at + _LONGEST_SIZE_LINE)
            if end < 0:
                if size - at >= _LONGEST_SIZE_LINE:
                    raise InvalidResponseError("a line between chunks that is too long")
                self._rest = data[at:]
                return -1
            if self._trailer_lines:
                if end == at:
                    return at + 2
                self._trailer_lines += 1
                if self._trailer_lines > _MOST_TRAILERS:
                    raise InvalidResponseError("too many trailers")
                at = end + 2
                continue
            count = _CHUNK_SIZES[data[at:end]]
            begin, at = end + 2, end + count + 4
            if not count:
                self._trailer_lines, at = 1, begin
            elif data.startswith(b"\r\n", at - 2):
                pieces.append(data[begin : at - 2])
            else:
                self._left = count + 2
                at = begin + self._read_rest(data[begin:], pieces)
        return -1

    def _read_rest(self, data: bytes, pieces: list[bytes]) -> int:
        """Read the rest of a chunk with its line end, as far as it is there; return the place after it.

        Raises:
            InvalidResponseError: the chunk is longer than its size.

        """
        taken = min(self._left, len(data))
        content = min(max(self._left - 2, 0), taken)
        if content:
            pieces.append(data[:content])
        line_end = b"\r\n"[2 - min(2, self._left) :]
        if not line_end.startswith(data[content:taken]):
            raise InvalidResponseError("a chunk that is longer than its size")
        self._left -= taken
        return taken

    def _finish(self, call: EngineCall, data: bytes, *, is_surplus: bool = False) -> None:
        """Hand over the end of the response. The connection is free before, for what the call does next."""
        call.connection = self._call = None
        self._expects, self._rest = _IDLE, b""
        self.silent_since = NEVER
        if is_surplus or not self._keeps_alive or self._is_behind():
            self.cut()
        else:
            self._become_idle()
        call.on_end(data, is_surplus=is_surplus)

    def _is_behind(self) -> bool:
        """Return whether no request can follow: the connection is gone, or the engine has not read all of this one."""
        transport = self._transport
        return transport is None or (self._has_large and transport.get_write_buffer_size() > 0)

    def _become_idle(self) -> None:
        if self.is_paused:
            self.resume()
            self.silent_since = NEVER
        self.is_usable = self.is_reused = True
        self.idle_since = self._now()
        self._owner.idle[self.origin].append(self)

    def _break(self, why: str, *, is_silence: bool = False) -> None:
        """End the call with an error."""
        call, had_bytes = self._call, self._has_bytes
        if call is not None:
            self._release()
            self.cut()
            error = BrokenResponseError(why, had_bytes=had_bytes, is_silence=is_silence)
            self._owner.on_broken(self, call, error)

    def _release(self) -> None:
        """Forget the call."""
        if self._call is not None:
            self._call.connection = None
        self._call, self._expects, self._rest = None, _IDLE, b""
        self.silent_since = NEVER
