"""OpenAI's Responses as they come from engines; only a stream that cannot go on is ended in their words."""

import re

import orjson
from typing_extensions import override

from gateway.clients.surface import Telling
from gateway.errors import Refusal
from gateway.upstream.exchange import Headers

_NUMBER = re.compile(rb'"sequence_number":(\d{1,9})')


class Responding(Telling):
    """Passes one stream through."""

    def __init__(self) -> None:
        self._last = b""

    @override
    def whole(self, status: int, headers: Headers, body: bytes) -> tuple[int, Headers, bytes]:
        return status, headers, body

    @override
    def begin(self, headers: Headers) -> Headers:
        return headers

    @override
    def events(self, data: bytes) -> bytes:
        self._last = data
        return data

    @override
    def end(self) -> bytes:
        return b""

    @override
    def broken(self, refusal: Refusal) -> bytes:
        numbers = _NUMBER.findall(self._last)
        error = {
            "type": "error",
            "code": refusal.code,
            "message": refusal.message,
            "param": refusal.param,
            "sequence_number": int(numbers[-1]) + 1 if numbers else 0,
        }
        return b"event: error\ndata: " + orjson.dumps(error) + b"\n\n"
