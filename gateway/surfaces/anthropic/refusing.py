"""Refusals and counts of tokens as Anthropic tells them. Does no I/O."""

import orjson
from typing_extensions import override

from gateway.clients.surface import Telling
from gateway.errors import Refusal
from gateway.surfaces import answers
from gateway.surfaces.anthropic import errors
from gateway.upstream.exchange import Headers


class Refusing(Telling):
    """Tells refusals, whoever refused."""

    request_id = ""

    @override
    def whole(self, status: int, headers: Headers, body: bytes) -> tuple[int, Headers, bytes]:
        headers = self.begin(headers)
        told = errors.body(status, answers.reason(body), self.request_id)
        return errors.status(status), headers, told

    @override
    def begin(self, headers: Headers) -> Headers:
        found = next((value for name, value in headers if name == b"x-request-id"), b"")
        self.request_id = found.decode("latin-1")
        return [*headers, (b"request-id", found)]

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
        return b"event: error\ndata: " + errors.body(status, message, self.request_id) + b"\n\n"


class Counting(Refusing):
    """Tells how many tokens there are."""

    @override
    def whole(self, status: int, headers: Headers, body: bytes) -> tuple[int, Headers, bytes]:
        if status != 200:
            return super().whole(status, headers, body)
        counted = {"input_tokens": orjson.loads(body)["count"]}
        return 200, self.begin(headers), orjson.dumps(counted)
