"""Writer of one HTTP/1.1 response. Written by hand because uvicorn's writer costs more than all of routing."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from gateway.request import RawHeaders

_CLOSE_LINE = b"connection: close\r\n"


def header_lines(headers: RawHeaders) -> bytes:
    """Return headers as they are written."""
    return b"".join([b"%b: %b\r\n" % header for header in headers])


@dataclass(slots=True, eq=False)
class ResponseWriter:
    """Writes one response: started once at most, ended once at most. Writes nothing to a disconnected client."""

    transport: asyncio.Transport
    flow: FlowControl
    common: bytes
    """Header lines of every response, such as the date."""
    on_complete: Callable[[], None]
    on_last: Callable[[], None]
    """Called at the end of the last response on the connection."""
    keep_alive: bool
    is_http_10: bool = False
    status: int = 0
    is_complete: bool = False
    is_gone: bool = False
    _head: bytes = b""
    _is_streamed: bool = False

    @property
    def is_started(self) -> bool:
        """True once the status is sent, so that it cannot change."""
        return self.status != 0

    @property
    def is_streamed(self) -> bool:
        """True if the response is sent event by event."""
        return self._is_streamed

    def whole(self, status: int, head: bytes, body: bytes) -> None:
        """Send a complete response. `head`: its header lines without the length."""
        self.status = status
        if not self.is_gone:
            self.transport.write(
                b"%b%b%b%bcontent-length: %d\r\n\r\n%b"
                % (
                    STATUS_LINE[status],
                    self.common,
                    head,
                    b"" if self.keep_alive else _CLOSE_LINE,
                    len(body),
                    body,
                )
            )
        self._complete()

    def begin(self, status: int, head: bytes) -> None:
        """Begin a response of unknown length. Its head is sent with the first piece."""
        self.status, self._is_streamed = status, True
        if self.is_http_10:
            self.keep_alive = False  # the end of the connection ends the body
            self._head = self._begun(status, head) + b"\r\n"
        else:
            self._head = self._begun(status, head) + b"transfer-encoding: chunked\r\n\r\n"

    def piece(self, data: bytes) -> bool:
        """Send a piece; return whether the client reads too slowly, in which case `drained` must be awaited."""
        if not data or self.is_gone:
            return False
        # Framed here without a coroutine, because this runs for each event.
        if self.is_http_10:
            self.transport.write(self._head + data)
        else:
            self.transport.write(b"%b%x\r\n%b\r\n" % (self._head, len(data), data))
        self._head = b""
        return self.flow.write_paused

    async def drained(self) -> None:
        """Wait until the client reads again."""
        await self.flow.drain()

    def end(self, data: bytes = b"") -> None:
        """Send the last piece and end the response."""
        if not self.is_gone:
            framed = self._framed(data) if data else b""
            last = b"" if self.is_http_10 else b"0\r\n\r\n"
            self.transport.write(self._head + framed + last)
        self._complete()

    def abort(self) -> None:
        """Abort the connection, so that the client sees an incomplete response."""
        self.transport.abort()

    def _framed(self, data: bytes) -> bytes:
        return data if self.is_http_10 else b"%x\r\n%b\r\n" % (len(data), data)

    def _begun(self, status: int, head: bytes) -> bytes:
        return STATUS_LINE[status] + self.common + head + (b"" if self.keep_alive else _CLOSE_LINE)

    def _complete(self) -> None:
        if self.is_complete:
            return
        self.is_complete = True
        if not self.keep_alive and not self.is_gone:
            self.on_last()
        self.on_complete()
