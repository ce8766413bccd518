"""Calls to engines: one request, the receiver of its response, and the errors that end it.

A `WholeCall` is awaited, for health checks and the admin API. Requests of clients need no waiting.
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
    begun: bytearray | None = None
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


class WholeCall(EngineCall, kw_only=True):
    """One request whose complete response is awaited."""

    limit: int
    """The largest body in bytes; 0: the head is enough, and the body is not awaited."""
    response: "asyncio.Future[tuple[int, bytes]]" = msgspec.field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Status and body, or the error."""
    _status: int = 0
    _body: bytearray = msgspec.field(default_factory=bytearray)

    @override
    def on_head(self, head: "ResponseHead") -> None:
        self._status = head.status
        if not self.limit:
            self.cancel()
            self.on_end(b"")

    @override
    def on_body(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > self.limit:
            self.cancel()
            why = f"the response is larger than {self.limit} bytes"
            self.on_error(BrokenResponseError(why, had_bytes=True))

    @override
    def on_recorded(self, events: bytes, records: list[bytes]) -> None:
        self.on_body(events)

    @override
    def on_refused(self, last_event: bytes) -> None:
        self.on_end(last_event)

    @override
    def on_end(self, data: bytes) -> None:
        if not self.response.done():
            self.response.set_result((self._status, bytes(self._body + data)))

    @override
    def on_error(self, error: UpstreamError) -> None:
        if not self.response.done():
            self.response.set_exception(error)
