"""Calls to engines: one request, the receiver of its response, and the errors that end it.

An `Exchange` is a call whose reader waits, for health checks. Requests of clients need no waiting.
"""

import asyncio
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import msgspec
from typing_extensions import override

from machinery.clock import NEVER
from schemas.wire.engine_address import EngineAddress

if TYPE_CHECKING:  # they carry calls
    from gateway.upstream.response_head import ResponseHead

Headers: TypeAlias = list[tuple[bytes, bytes]]
# The limit of unread bytes before the engine is paused.
_BUFFER_LIMIT = 256 << 10


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
        self,
        message: str,
        *,
        is_timeout: bool = False,
        is_own_fault: bool = False,
        has_no_route: bool = False,
    ) -> None:
        super().__init__(message)
        self.is_timeout = is_timeout
        """True if the connection was not refused but timed out: the engine may be there and hang."""
        self.is_own_fault = is_own_fault
        """True if the gateway could not open a connection: it says nothing about the engine."""
        self.outcome: Final = "no_route" if has_no_route else "unreachable"
        """As in fleet_gateway_attempts_total; no_route is EHOSTUNREACH, with which macOS keeps a program from a network."""


UpstreamError: TypeAlias = UnreachableError | BrokenResponseError


class CallCarrier(Protocol):
    """Carries calls: a link to an engine, or a request to an external server."""

    def drop(self, call: "EngineCall") -> None:
        """Give up the call's response."""
        ...

    def pause(self, call: "EngineCall") -> None:
        """Receive no more than what is in transit."""
        ...

    def resume(self, call: "EngineCall") -> None:
        """Receive again."""
        ...

    def fail_call(self, call: "EngineCall", why: str, *, is_silence: bool) -> None:
        """End the call because its time is up."""
        ...


class EngineCall(msgspec.Struct, eq=False, kw_only=True):
    """One request to an engine. Subclasses receive the response: its head, parts of its body, then its end or an error."""

    origin: EngineAddress
    raw: bytes
    """The payload of a link's REQUEST, which is translated for external servers; empty once it is sent."""
    body: bytes | memoryview = b""
    """The rest of the request, if its body is large. Empty with `raw`."""
    replica: str = ""
    """The replica that must answer; empty for any."""
    silence_s: float
    """The engine is given up after so long without a byte."""
    until_s: float
    """The engine is given up at this time, by the clock; may be changed."""
    connection: CallCarrier | None = None
    """The carrier of the call; None before, and once the response is complete."""
    stream_id: int = 0
    """The stream of the call on its link."""
    silent_since: float = NEVER
    """Time since which the engine owes the next byte; infinite if it owes none."""
    unread: int = 0
    """Bytes that arrived on the link and were not granted again."""
    is_paused: bool = False
    """True while the client is slow."""
    has_bytes: bool = False
    """True once the head of the response has arrived."""
    begun: bytes = b""
    """The beginning of a large RECORDED of the link."""

    def on_progress(self, record: bytes) -> None:
        """Receive a sign of progress before the response, with a resume record or none."""

    def on_head(self, head: "ResponseHead") -> None:
        """Receive the head."""
        raise NotImplementedError

    def on_body(self, data: bytes) -> None:
        """Receive a part of the body after which more follows."""
        raise NotImplementedError

    def on_recorded(self, events: bytes, records: list[bytes]) -> None:
        """Receive whole events of a stream that another engine can continue, and their resume records, some empty."""
        raise NotImplementedError

    def on_end(self, data: bytes) -> None:
        """Receive the last part of the body, which may be empty."""
        raise NotImplementedError

    def on_refused(self, last_event: bytes) -> None:
        """Receive the event with which the engine ends a stream early, as any other engine would."""
        raise NotImplementedError

    def on_error(self, error: UpstreamError) -> None:
        """Receive the reason for which no more of the response comes."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Give the call up: nothing is received any more, and the engine sees a closed connection."""
        if self.connection is not None:
            self.connection.drop(self)

    def pause(self) -> None:
        """Read no more for now, because the client reads too slowly."""
        if self.connection is not None:
            self.connection.pause(self)

    def resume(self) -> None:
        """Read again."""
        if self.connection is not None:
            self.connection.resume(self)


class Upstream(Protocol):
    """Sends requests to engines."""

    def send(self, call: EngineCall) -> None:
        """Send a request; its response, or the reason why there is none, goes to the call."""
        ...


class Exchange(EngineCall, kw_only=True):
    """One request and its response, read piece by piece."""

    _change: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    _head: "ResponseHead | None" = None
    _pieces: list[bytes] = msgspec.field(default_factory=list)
    _buffered: int = 0
    _is_complete: bool = False
    _error: UpstreamError | None = None

    @property
    def status(self) -> int:
        return 0 if self._head is None else self._head.status

    async def wait_head(self) -> None:
        """Wait for the head of the response; without one, release the response.

        Raises:
            UnreachableError: the engine accepts no connection.
            BrokenResponseError: the connection ended before the head had arrived.

        """
        try:
            while self._head is None:
                await self._changed()
        except BaseException:
            self.close()
            raise

    async def read(self) -> bytes:
        """Return the bytes that arrived since the last call; empty at the end.

        Raises:
            BrokenResponseError: the connection ended before the response was complete.

        """
        while not self._pieces:
            if self._is_complete:
                return b""
            await self._changed()
        data = b"".join(self._pieces)
        self._pieces.clear()
        self._buffered = 0
        self.resume()
        return data

    async def read_all(self, limit: int) -> bytes:
        """Return the rest of the body.

        Raises:
            BrokenResponseError: the response is incomplete, or larger than `limit` bytes.

        """
        parts = bytearray()
        while piece := await self.read():
            parts += piece
            if len(parts) > limit:
                why = f"the response is larger than {limit} bytes"
                raise BrokenResponseError(why, had_bytes=True)
        return bytes(parts)

    def close(self) -> None:
        """Release the response; if it has not arrived to its end, the connection is closed."""
        self.cancel()

    async def _changed(self) -> None:
        if self._error is not None:
            raise self._error
        self._change.clear()
        await self._change.wait()

    def _add(self, data: bytes) -> None:
        if data:
            self._pieces.append(data)
            self._buffered += len(data)
            if self._buffered >= _BUFFER_LIMIT:
                self.pause()
        self._change.set()

    @override
    def on_head(self, head: "ResponseHead") -> None:
        self._head = head
        self._change.set()

    @override
    def on_body(self, data: bytes) -> None:
        self._add(data)

    @override
    def on_recorded(self, events: bytes, records: list[bytes]) -> None:
        self._add(events)

    @override
    def on_refused(self, last_event: bytes) -> None:
        self.on_end(last_event)

    @override
    def on_end(self, data: bytes) -> None:
        self._is_complete = True
        self._add(data)

    @override
    def on_error(self, error: UpstreamError) -> None:
        self._error = error
        self._change.set()
