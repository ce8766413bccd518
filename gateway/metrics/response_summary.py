"""How an engine's answer ended, by its last bytes: whole, or with a word of why not. Pure.

Engines that cannot go on say so in an error event, and send no [DONE] after it.

The tokens that an answer says it took, found without parsing what is long. Pure.
"""

import re
from typing import Annotated, TypeAlias

import msgspec
import orjson

_DONE = b"data: [DONE]"
# Streams of /v1/responses have no [DONE]. Within an event's data there is no line's end, so no text passes for these.
_RESPONDED = (b"event: response.completed\n", b"event: response.incomplete\n")
# Within texts quotes are escaped.
_TIMEOUT = b'"request_timeout"'
_LONGEST = 300


def is_complete_stream(last: bytes) -> bool:
    """Return whether a stream with this last piece came to its end."""
    return _DONE in last or any(event in last for event in _RESPONDED)


def is_timeout(last: bytes) -> bool:
    """Return whether an answer, or a stream's last piece, says that the request's own time was up."""
    return _TIMEOUT in last


def stream_error(last: bytes) -> str:
    """Return what an engine said last, of a stream that ended before its end."""
    event = last.rstrip().rpartition(b"\n\n")[2]
    try:
        found = orjson.loads(event[event.index(b"{") :])
        said = (found.get("response") or found)["error"]["message"]
    except (ValueError, AttributeError, KeyError, TypeError):
        return "its stream ended before its end"
    return str(said)[:_LONGEST]


TokenCounts: TypeAlias = tuple[int, int, int]
"""Of the prompt, those of it that the engine had read before, and of the answer."""

# Where `usage` is looked for; what may follow it is a few hundred bytes.
_TAIL = 4096
_USAGE = b'"usage"'
# As engines of ours write it: one step instead of three.
_OURS = re.compile(
    rb'"usage":\{"prompt_tokens":(\d{1,9}),(?:"completion_tokens":(\d{1,9}),)?"total_tokens":\d{1,9}'
    rb'(?:,"prompt_tokens_details":\{"cached_tokens":(\d{1,9}))?'
)
# As others may.
_PROMPT = re.compile(rb'"prompt_tokens"\s*:\s*(\d{1,9})')
_CACHED = re.compile(rb'"cached_tokens"\s*:\s*(\d{1,9})')
_OUTPUT = re.compile(rb'"completion_tokens"\s*:\s*(\d{1,9})')
# How answers and streams of /v1/responses begin.
_RESPONSES = (b"event:", b'{"id":"resp')

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=10**9)]


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
    """Of an answer that was not streamed."""


_EVENT = msgspec.json.Decoder(_Event)


def parse_usage(body: bytes) -> TokenCounts | None:
    """Return what an answer, or the last events of a stream, says of tokens; None if it says nothing.

    Within texts quotes are escaped, so that no text passes for it.
    """
    if body.startswith(_RESPONSES):
        return _of_response(body)
    at = body.rfind(_USAGE, max(0, len(body) - _TAIL))
    if at < 0:
        return None
    if found := _OURS.match(body, at):
        prompt, output, cached = found.groups(b"0")
        return int(prompt), int(cached), int(output)
    told = [pattern.search(body, at) for pattern in (_PROMPT, _CACHED, _OUTPUT)]
    if told[0] is None and told[2] is None:
        return None
    first, second, third = (int(one[1]) if one is not None else 0 for one in told)
    return first, second, third


def _of_response(body: bytes) -> TokenCounts | None:
    """Return the same of a response, which has to be parsed: it repeats what the client sent, such as tools.

    A client could write a usage of its own there.
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
