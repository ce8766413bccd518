"""Facts about an engine's response that are found without parsing it: its end and its token counts. Pure.

An engine that cannot continue sends an error event and no [DONE].
"""

import re
from typing import Annotated, TypeAlias

import msgspec
import orjson

from schemas.wire import streams

_DONE = streams.DONE.rstrip()
# Streams of /v1/responses have no [DONE]. Event data has no line breaks, so no text can imitate
# these.
_RESPONDED = (b"event: response.completed\n", b"event: response.incomplete\n")
# Quotes in texts are escaped.
_TIMEOUT = b'"request_timeout"'
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
    found = _OURS.search(body, max(0, len(body) - _TAIL))
    if found is not None and not body.startswith(_RESPONSES):
        prompt, output, cached = found.groups(b"0")
        return int(prompt), int(cached), int(output)
    if body.startswith(_RESPONSES):
        return _of_response(body)
    at = body.rfind(_USAGE, max(0, len(body) - _TAIL))
    if at < 0:
        return None
    matches = [pattern.search(body, at) for pattern in (_PROMPT, _CACHED, _OUTPUT)]
    if matches[0] is None and matches[2] is None:
        return None
    first, second, third = (int(one[1]) if one is not None else 0 for one in matches)
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
    found = event.usage or event.response.usage
    if found is None:
        return None
    return found.input_tokens, found.input_tokens_details.cached_tokens, found.output_tokens
