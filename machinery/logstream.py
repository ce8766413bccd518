"""A log as an answer over HTTP: piece by piece, for a few at a time."""

from collections.abc import AsyncIterator

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from typing_extensions import override

# Each that is followed is looked at four times a second.
MOST = 16


class Readers:
    """How many logs are being read."""

    def __init__(self) -> None:
        self.count = 0

    @property
    def is_full(self) -> bool:
        """Whether another one must wait."""
        return self.count >= MOST


class LogStream(StreamingResponse):
    """Pieces of a log as text; counted for as long as it is being sent."""

    def __init__(self, pieces: AsyncIterator[bytes], readers: Readers) -> None:
        super().__init__(
            pieces,
            media_type="text/plain; charset=utf-8",
            headers={"cache-control": "no-store", "x-content-type-options": "nosniff"},
        )
        self._readers = readers

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._readers.count += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._readers.count -= 1
