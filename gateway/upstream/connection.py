"""One HTTP/1.1 connection to an engine: it parses the responses and hands them to the call that it carries.

No task and no future: each read of the socket calls the receiver of the response directly.
"""

import asyncio
from collections.abc import Callable
from typing import TypeAlias, cast

import msgspec
from typing_extensions import override

from gateway.upstream.response_head import (
    CHUNK_BEGINNING,
    CHUNK_BEGINNINGS,
    CHUNK_SIZES,
    UNTIL_CLOSE,
    InvalidResponseError,
    ResponseHead,
    parse_head,
)
from machinery.clock import NEVER, Clock
from machinery.http_server import MAX_HEAD_BYTES
from schemas.wire.engine_address import EngineAddress

Headers: TypeAlias = list[tuple[bytes, bytes]]
_BEGINNING = b"HTTP/1."
# A chunk's size with its extensions. Engines send no extensions.
_LONGEST_SIZE_LINE = 1024
_CR, _LF = b"\r\n"
_SWITCHING = 101
_MOST_TRAILERS = 100
# What the next bytes of a connection belong to.
_IDLE, _HEAD, _LENGTH, _CHUNKS, _UNTIL_CLOSE = range(5)


class BrokenResponseError(Exception):
    """The connection ended before the response was complete."""

    def __init__(self, message: str, *, had_bytes: bool, is_silence: bool = False) -> None:
        super().__init__(message)
        self.had_bytes = had_bytes
        """True if any byte of the response had arrived."""
        self.is_silence = is_silence
        """True if the engine was given up after too long a silence."""


class SuspendedError(BrokenResponseError):
    """The gateway gave the response up, to continue it later: its client reads too slowly while others wait."""


class UnreachableError(Exception):
    """The engine accepted no connection, so it has not seen the request."""

    def __init__(
        self, message: str, *, is_timeout: bool = False, is_own_fault: bool = False
    ) -> None:
        super().__init__(message)
        self.is_timeout = is_timeout
        """True if the connection was not refused but timed out: the engine may be there and hang."""
        self.is_own_fault = is_own_fault
        """True if the gateway could not open a connection: it says nothing about the engine."""


UpstreamError: TypeAlias = UnreachableError | BrokenResponseError


class EngineCall(msgspec.Struct, eq=False, kw_only=True):
    """One request to an engine. Subclasses receive the response: its head, parts of its body, then its end or an error."""

    origin: EngineAddress
    raw: bytes
    """The complete HTTP request."""
    silence_s: float
    """The engine is given up after so long without a byte."""
    until_s: float
    """The engine is given up at this time, by the clock; may be changed."""
    connection: "Connection | None" = None
    """The connection that carries the call; None before, and once the response is complete."""
    dialing: asyncio.Task[None] | None = None
    """The task that opens a connection for the call."""
    receive: Callable[[bytes], None] | None = None
    """Receives parts of the body in place of `on_body`, once there is something that does nothing else."""

    def on_whole(self, head: ResponseHead, body: bytes) -> bool:
        """Receive a complete response; return False if it is not valid, so that its connection is not used again."""
        raise NotImplementedError

    def on_head(self, head: ResponseHead) -> None:
        """Receive the head."""
        raise NotImplementedError

    def on_body(self, data: bytes) -> None:
        """Receive a part of the body after which more follows."""
        raise NotImplementedError

    def on_end(self, data: bytes, *, is_surplus: bool) -> None:
        """Receive the last part of the body, which may be empty. `is_surplus`: more came than the head declares."""
        raise NotImplementedError

    def on_error(self, error: UpstreamError) -> None:
        """Receive the reason for which no more of the response comes."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Give the call up: nothing is received any more, and the engine sees a closed connection."""
        if self.dialing is not None:
            self.dialing.cancel()
            self.dialing = None
        if self.connection is not None:
            self.connection.drop(self)

    def pause(self) -> None:
        """Read no more for now, because the client reads too slowly."""
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        """Read again."""
        if self.connection is not None:
            self.connection.resume()


class ConnectionOwner:
    """Owner of connections: told of their ends."""

    def settle(self, connection: "Connection") -> None:
        """Take back a connection that became idle, or forget one that is gone."""
        raise NotImplementedError

    def on_broken(
        self, connection: "Connection", call: EngineCall, error: BrokenResponseError
    ) -> None:
        """Handle a call whose response is missing or incomplete."""
        raise NotImplementedError


class Connection(asyncio.Protocol):
    """One connection. Its owner is told when it becomes idle, when it is gone, and of each call that breaks."""

    def __init__(self, clock: Clock, origin: EngineAddress, owner: ConnectionOwner) -> None:
        self.origin = origin
        self.is_usable = False
        self.idle_since = NEVER
        self.silent_since = NEVER
        """Time since which the engine owes the next byte; infinite if it owes none."""
        self.has_received = False
        """True if anything arrived since this was last reset."""
        self.opened_s = clock.monotonic()
        self.end = ""
        """The reason of its end."""
        self.is_cut = False
        """True once the gateway has closed it."""
        self.is_refused = False
        """True once its end was counted as a refusal by the engine."""
        self.is_proven = False
        """True once anything has arrived: the engine has accepted the connection."""
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

    def rest(self) -> None:
        """Become idle without a request, so that one finds the connection open."""
        if self._transport is not None and not self._transport.is_closing():
            self._become_idle()

    def drop(self, call: EngineCall) -> None:
        """Give up the call's response, whose rest would be in the way of another."""
        if self._call is call:
            self._release()
            self.cut()

    def cut(self) -> None:
        """Close at once, so that the engine frees the request's slot."""
        self.is_usable, self.is_cut = False, True
        if self._transport is not None:
            self._transport.abort()

    def fail(self, why: str, *, is_silence: bool) -> None:
        """Give the engine up."""
        if self._call is not None:
            self._break(why, is_silence=is_silence)
        self.cut()

    def pause(self) -> None:
        """Stop reading; the engine owes nothing meanwhile."""
        if not self.is_paused and self._transport is not None:
            self.is_paused, self.silent_since = True, NEVER
            self._transport.pause_reading()

    def resume(self) -> None:
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
    def ssl_object(self) -> object:
        """The TLS state; None without TLS."""
        return None if self._transport is None else self._transport.get_extra_info("ssl_object")

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
        call, expects = self._call, self._expects
        if call is None:
            # Input without a request must not become the response of the next one.
            self.cut()
            return
        try:
            if expects == _HEAD:
                self._feed_head(call, data)
                return
            if not self.is_paused:
                self.silent_since = self._now()
            if expects == _CHUNKS:
                if not self._is_within_chunk:
                    # Nearly always exactly one chunk arrives.
                    begin, end = CHUNK_BEGINNINGS[data[:CHUNK_BEGINNING]]
                    if end == len(data) and data[-1] == _LF and data[-2] == _CR:
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
        self.end = "the connection was lost" if exc is None else f"the connection was lost: {exc}"
        if self._call is not None:
            self._break(self.end)
        self._owner.settle(self)

    def _feed_head(self, call: EngineCall, data: bytes) -> None:
        """Read the head, and what follows it."""
        self.is_proven = self._has_bytes = True
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
        if head.length == len(data):
            self._end_whole(
                call, head, data
            )  # nearly always all of a whole response arrives at once
            return
        self.silent_since, self._keeps_alive = self._now(), head.keeps_alive
        call.on_head(head)
        if self._call is call:
            self._begin_body(call, head, data)

    def _end_whole(self, call: EngineCall, head: ResponseHead, body: bytes) -> None:
        """Hand over a complete response."""
        call.connection = self._call = None
        self._expects, self.silent_since = _IDLE, NEVER
        if not call.on_whole(head, body) or not head.keeps_alive or self._transport is None:
            self.cut()
            return
        self.is_usable = self.is_reused = True
        self.idle_since = self._now()
        self._owner.settle(self)

    def _begin_body(self, call: EngineCall, head: ResponseHead, data: bytes) -> None:
        """Read what came with the head."""
        if head.is_chunked:
            self._expects, self._left, self._trailer_lines = _CHUNKS, 0, 0
            self._is_within_chunk = False
            if data:
                self._feed_chunks(call, data)
            return
        self._expects = _UNTIL_CLOSE if head.length == UNTIL_CLOSE else _LENGTH
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
                self._count_trailer()
                at = end + 2
                continue
            count = CHUNK_SIZES[data[at:end]]
            begin, at = end + 2, end + count + 4
            if not count:
                self._trailer_lines, at = 1, begin
            elif data.startswith(b"\r\n", at - 2):
                pieces.append(data[begin : at - 2])
            else:
                self._left = count + 2
                at = begin + self._read_rest(data[begin:], pieces)
        return -1

    def _count_trailer(self) -> None:
        self._trailer_lines += 1
        if self._trailer_lines > _MOST_TRAILERS:
            raise InvalidResponseError("too many trailers")

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
        if self._transport is None or is_surplus or not self._keeps_alive:
            self.cut()
        else:
            self._become_idle()
        call.on_end(data, is_surplus=is_surplus)

    def _become_idle(self) -> None:
        if self.is_paused:
            self.resume()
            self.silent_since = NEVER
        self.is_usable = self.is_reused = True
        self.idle_since = self._now()
        self._owner.settle(self)

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
