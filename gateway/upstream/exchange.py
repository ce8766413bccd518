"""Exchange: a call to an engine whose reader waits, for health checks. Requests of clients need no waiting."""

import asyncio

import msgspec
from typing_extensions import override

from gateway.upstream.connection import BrokenResponseError, EngineCall, UpstreamError
from gateway.upstream.response_head import ResponseHead

# The limit of unread bytes before the engine is paused.
_BUFFER_LIMIT = 256 << 10


class Exchange(EngineCall, kw_only=True):
    """One request and its response, read piece by piece."""

    _change: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    _head: ResponseHead | None = None
    _pieces: list[bytes] = msgspec.field(default_factory=list)
    _buffered: int = 0
    _is_complete: bool = False
    _error: UpstreamError | None = None

    @property
    def status(self) -> int:
        return 0 if self._head is None else self._head.status

    @property
    def fields(self) -> dict[bytes, bytes]:
        """The last value of each header, by its name in lower case."""
        return {} if self._head is None else self._head.fields

    async def wait_head(self) -> None:
        """Wait for the head of the response.

        Raises:
            UnreachableError: the engine accepts no connection.
            BrokenResponseError: the connection ended before the head had arrived.

        """
        while self._head is None:
            await self._changed()

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
    def on_whole(self, head: ResponseHead, body: bytes) -> bool:
        self.on_head(head)
        self.on_end(body, is_surplus=False)
        return True

    @override
    def on_head(self, head: ResponseHead) -> None:
        self._head = head
        self._change.set()

    @override
    def on_body(self, data: bytes) -> None:
        self._add(data)

    @override
    def on_end(self, data: bytes, *, is_surplus: bool) -> None:
        self._is_complete = True
        self._add(data)

    @override
    def on_error(self, error: UpstreamError) -> None:
        self._error = error
        self._change.set()
