"""Refusals and counts of tokens as Anthropic tells them. Does no I/O."""

import orjson
from typing_extensions import override

from gateway.clients.surface import Telling
from gateway.errors import Refusal
from gateway.surfaces import answers
from gateway.surfaces.anthropic import errors
from gateway.upstream.exchange import Headers


class Refusing(Telling):
    """Tells refusals, whoever refused: with this API's names for an engine's."""

    request_id = ""

    @override
    def whole(self, status: int, headers: Headers, body: bytes) -> tuple[int, Headers, bytes]:
        return self.told(status, headers, errors.renamed(answers.reason(body)))

    def told(self, status: int, headers: Headers, message: str) -> tuple[int, Headers, bytes]:
        """Return a refusal with that status of ours, and these words."""
        headers = self.begin(headers)
        return errors.status(status), headers, errors.body(status, message, self.request_id)

    @override
    def begin(self, headers: Headers) -> Headers:
        found = next((value for name, value in headers if name == b"x-request-id"), b"")
        self.request_id = found.decode("latin-1")
        return [*headers, (b"request-id", found)] if found else headers

    @override
    def events(self, data: bytes) -> bytes:
        return b""

    @override
    def end(self) -> bytes:
        return b""

    @override
    def broken(self, refusal: Refusal) -> bytes:
        return self.error(refusal.status, refusal.message)

    def error(self, status: int, message: str) -> bytes:
        """Return the event that ends a stream with what went wrong."""
        body = errors.body(status, errors.renamed(message), self.request_id)
        return b"event: error\ndata: " + body + b"\n\n"


class Unread(Refusing):
    """Tells why a request was refused before it was one to an engine: its names are the client's own."""

    @override
    def whole(self, status: int, headers: Headers, body: bytes) -> tuple[int, Headers, bytes]:
        return self.told(status, headers, answers.reason(body))


class Counting(Refusing):
    """Tells how many tokens there are."""

    @override
    def whole(self, status: int, headers: Headers, body: bytes) -> tuple[int, Headers, bytes]:
        if status != 200:
            return super().whole(status, headers, body)
        counted = {"input_tokens": orjson.loads(body)["count"]}
        return 200, self.begin(headers), orjson.dumps(counted)
