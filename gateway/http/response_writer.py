"""One answer on its way to a client, as HTTP/1.1. Written by hand: uvicorn's own way costs more than all of routing."""

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
    """Begun at most once, ended at most once; says nothing to a client that is gone."""

    transport: asyncio.Transport
    flow: FlowControl
    common: bytes
    """Header lines of every response, such as the date."""
    on_complete: Callable[[], None]
    on_last: Callable[[], None]
    """Called at the end of the last answer on the connection."""
    keep_alive: bool
    is_http_10: bool = False
    status: int = 0
    is_complete: bool = False
    is_gone: bool = False
    _head: bytes = b""
    _is_streamed: bool = False

    @property
    def is_started(self) -> bool:
        """Whether the status is out, so that nothing else can be said any more."""
        return self.status != 0

    @property
    def is_streamed(self) -> bool:
        """Whether the answer goes out event by event."""
        return self._is_streamed

    def whole(self, status: int, head: bytes, body: bytes) -> None:
        """Send a complete answer; `head`: its header lines but for the length."""
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
        """Begin an answer of unknown length; its head goes out with the first piece."""
        self.status, self._is_streamed = status, True
        if self.is_http_10:
            self.keep_alive = False  # what ends the body is the end of the connection
            self._head = self._begun(status, head) + b"\r\n"
        else:
            self._head = self._begun(status, head) + b"transfer-encoding: chunked\r\n\r\n"

    def piece(self, data: bytes) -> bool:
        """Send a part of it; return whether the client does not read: then `drained` is to be awaited."""
        if not data or self.is_gone:
            return False
        # No coroutine, and framed here: this is done for each event.
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
        """Send the last part."""
        if not self.is_gone:
            framed = self._framed(data) if data else b""
            last = b"" if self.is_http_10 else b"0\r\n\r\n"
            self.transport.write(self._head + framed + last)
        self._complete()

    def abort(self) -> None:
        """End it so that the client sees that it is not whole."""
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
