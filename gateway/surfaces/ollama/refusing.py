"""Refusals as Ollama tells them. Does no I/O."""

import orjson
from typing_extensions import override

from gateway.clients.surface import Telling
from gateway.errors import Refusal
from gateway.surfaces import answers
from gateway.surfaces.ollama import options
from gateway.upstream.exchange import Headers

_LINES = (b"content-type", b"application/x-ndjson")
# What the engine calls what a client called otherwise.
_WORDS = {name: own for own, name in options.MAPPED.items() if own != name}
_WORDS |= {"reasoning_effort": "think", "response_format": "format"}


def refused(message: str) -> bytes:
    """Return an engine's refusal with this API's names in it."""
    for engines, own in _WORDS.items():
        message = message.replace(f"'{engines}'", f"'{own}'")
    return orjson.dumps({"error": message})


class Refusing(Telling):
    """Tells refusals, whoever refused: with this API's names for an engine's."""

    @override
    def whole(self, status: int, headers: Headers, body: bytes) -> tuple[int, Headers, bytes]:
        return status, headers, refused(answers.reason(body))

    @override
    def begin(self, headers: Headers) -> Headers:
        return [_LINES, *(header for header in headers if header[0] != b"content-type")]

    @override
    def events(self, data: bytes) -> bytes:
        return b""

    @override
    def end(self) -> bytes:
        return b""

    @override
    def broken(self, refusal: Refusal) -> bytes:
        return refused(refusal.message) + b"\n"


class Unread(Refusing):
    """Tells why a request was refused before it was one to an engine: its names are the client's own."""

    @override
    def whole(self, status: int, headers: Headers, body: bytes) -> tuple[int, Headers, bytes]:
        return status, headers, orjson.dumps({"error": answers.reason(body)})
