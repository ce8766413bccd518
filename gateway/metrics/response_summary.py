"""Facts about engines' responses that are found without parsing them, and their counts by version. Pure.

An engine that cannot continue sends an error event and no [DONE].
"""

import re
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

import msgspec
import orjson

from schemas.wire import streams
from schemas.wire.metrics import FIRST_TOKEN_BOUNDS_S

_DONE = streams.DONE.rstrip()
# Streams of /v1/responses have no [DONE]. Event data has no line breaks, so no text can imitate
# these.
_RESPONDED = (b"event: response.completed\n", b"event: response.incomplete\n")
# Quotes in texts are escaped.
_TIMEOUT = b'"request_timeout"'
_LOADING = b'"loading"'
_LONGEST = 300
TokenCounts: TypeAlias = tuple[int, int, int]
"""Tokens of the prompt, its cached part, and the answer."""
# The part of the end in which `usage` is searched; at most a few hundred bytes follow it.
_TAIL = 4096
_USAGE = b'"usage"'
# The format of our engines: one match instead of three.
_OURS = re.compile(
    rb'"usage":\{"prompt_tokens":(\d{1,9}),(?:"completion_tokens":(\d{1,9}),)?"total_tokens":\d{1,9}'
    rb'(?:,"prompt_tokens_details":\{"cached_tokens":(\d{1,9}))?'
)
# Other formats.
_PROMPT = re.compile(rb'"prompt_tokens"\s*:\s*(\d{1,9})')
_CACHED = re.compile(rb'"cached_tokens"\s*:\s*(\d{1,9})')
_OUTPUT = re.compile(rb'"completion_tokens"\s*:\s*(\d{1,9})')
# The beginnings of responses and streams of /v1/responses.
_RESPONSES = (b"event:", b'{"id":"resp')
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=10**9)]


def is_complete_stream(last: bytes) -> bool:
    """Return whether a stream with this last piece is complete."""
    return _DONE in last or is_response_end(last)


def is_response_end(last: bytes) -> bool:
    """Return whether this is the last piece of a complete stream of /v1/responses."""
    return any(event in last for event in _RESPONDED)


def is_timeout(last: bytes) -> bool:
    """Return whether a response, or a stream's last piece, reports that the request's own deadline has passed."""
    return _TIMEOUT in last


def is_loading(body: bytes) -> bool:
    """Return whether a 503 says that the engine has not loaded its model yet."""
    return _LOADING in body


def stream_error(last: bytes) -> str:
    """Return the engine's last message in an incomplete stream."""
    event = last.rstrip().rpartition(b"\n\n")[2]
    try:
        found = orjson.loads(event[event.index(b"{") :])
        message = (found.get("response") or found)["error"]["message"]
    except (ValueError, AttributeError, KeyError, TypeError):
        return "its stream ended before its end"
    return str(message)[:_LONGEST]


class _Details(msgspec.Struct):
    cached_tokens: _Count = 0


class _Usage(msgspec.Struct):
    input_tokens: _Count = 0
    output_tokens: _Count = 0
    input_tokens_details: _Details = msgspec.field(default_factory=_Details)


class _Response(msgspec.Struct):
    usage: _Usage | None = None


class _Event(msgspec.Struct):
    response: _Response = msgspec.field(default_factory=_Response)
    usage: _Usage | None = None
    """Set in responses that are not streamed."""


_EVENT = msgspec.json.Decoder(_Event)


def parse_usage(body: bytes) -> TokenCounts | None:
    """Return the token counts in a response, or in the last events of a stream; None if there are none.

    Quotes in texts are escaped, so no text can imitate the field.
    """
    if body.startswith(_RESPONSES):
        return _of_response(body)
    at = body.rfind(_USAGE, -_TAIL)
    if at < 0:
        return None
    found = _OURS.match(body, at)
    if found is not None:
        prompt, output, cached = found.groups(b"0")
        return int(prompt), int(cached), int(output)
    matches = [pattern.search(body, at) for pattern in (_PROMPT, _CACHED, _OUTPUT)]
    if matches[0] is None and matches[2] is None:
        return None
    first, second, third = (int(match_[1]) if match_ is not None else 0 for match_ in matches)
    return first, second, third


def _of_response(body: bytes) -> TokenCounts | None:
    """Return the token counts of a /v1/responses response.

    It is parsed, because it repeats the client's input, which could contain a usage of its own.
    """
    if body.startswith(b"event:"):
        _, _, last = body.rpartition(b"\ndata:")
        body = last.partition(b"\n")[0]
    try:
        event = _EVENT.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    usage = event.usage or event.response.usage
    if usage is None:
        return None
    return usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens


@dataclass(slots=True)
class VersionCounts:
    """Counts of one version since the gateway started."""

    ok: int = 0
    error: int = 0
    """A 5xx response, no connection, or an incomplete response."""
    refused: int = 0
    """4xx: the request was invalid, or there was no room."""
    client_gone: int = 0
    """The client left, or its own timeout (x-request-timeout) passed."""
    first_tokens: list[int] = field(default_factory=lambda: [0] * (len(FIRST_TOKEN_BOUNDS_S) + 1))
    first_token_s: float = 0.0
    tokens: int = 0
    token_s: float = 0.0

    def outcomes(self) -> tuple[int, int, int, int]:
        """Return the counts in the order of `VERSION_OUTCOMES`."""
        return self.ok, self.error, self.refused, self.client_gone

    def record_response(self, status: int, body: bytes, seconds: float) -> TokenCounts:
        """Count a response that was not streamed; return its token counts."""
        if status >= 400:
            if status >= 500:
                self.error += 1
            else:
                self.refused += 1
            return 0, 0, 0
        self.ok += 1
        usage = parse_usage(body)
        if usage is None:
            return 0, 0, 0
        if usage[2] and seconds > 0:
            self.tokens += usage[2]
            self.token_s += seconds
        return usage

    def record_first_token(self, seconds: float) -> None:
        """Count the first event of a stream."""
        self.first_tokens[bisect_left(FIRST_TOKEN_BOUNDS_S, seconds)] += 1
        self.first_token_s += seconds

    def record_stream(self, tokens: int, seconds: float) -> None:
        """Count a complete stream, with about so many tokens within `seconds` after the first event."""
        self.ok += 1
        if tokens > 0 and seconds > 0:
            self.tokens += tokens
            self.token_s += seconds
