"""The APIs that clients may speak: how each asks, and how it is answered. Engines speak OpenAI's alone."""

from typing import Protocol

from gateway.asks import Ask, Heard
from gateway.errors import Refusal
from gateway.upstream.exchange import Headers


class Telling(Protocol):
    """How one answer is told, made of an engine's in OpenAI's words. Does no I/O."""

    def whole(self, status: int, headers: Headers, body: bytes) -> tuple[int, Headers, bytes]:
        """Return a complete answer's status, headers and body; refusals come here, too."""
        ...

    def begin(self, headers: Headers) -> Headers:
        """Return the headers of a stream."""
        ...

    def events(self, data: bytes) -> bytes:
        """Return what is sent for one or more whole events; may be empty."""
        ...

    def end(self) -> bytes:
        """Return what ends a stream that was told to its end."""
        ...

    def broken(self, refusal: Refusal) -> bytes:
        """Return what ends a stream that cannot go on; must not look like the end of the text."""
        ...


class Surface(Protocol):
    """One API."""

    def telling(self) -> Telling | None:
        """Return how refusals are told before the request is read; None for OpenAI's own way."""
        ...

    def read(self, heard: Heard) -> tuple[Ask, Telling | None]:
        """Return what is asked, and how to tell the answer; None if it is passed through as it is.

        Raises:
            RefusedError: the request is not one of this API.

        """
        ...
