"""Resume comments of a stream: the engine's report of its progress, from which another engine continues. Pure.

A resume comment (": fleet {...}") precedes the data of an event; see docs/reference/openai.md,
"Continuing an answer elsewhere". Comments are removed from the client's stream and stored unparsed,
because only the death of an engine needs them.
"""

import re
from typing import Any

import msgspec
import orjson

from schemas.wire import streams

_COMMENT = streams.RESUME_COMMENT
_PREFIX = len(_COMMENT)
# Engines begin each chunk with its id. Only the end, comments and errors look different.
_CHUNK = b'\ndata: {"id"'
_KNOWN = (b'data: {"id"', b"data: [DONE]", b":")
_ERROR = b'data: {"error"'
# Chunks and [DONE], with or without comments (streams.RESUME_COMMENT): one match instead of several
# steps for each.
_COMMON_EVENTS = re.compile(
    rb'(?:: fleet ([^\n]*\n)(?=data: \{"id"))?(data: (?:\{"id"|\[DONE\])[^\n]*\n\n)'
)
# Bytes of a comment with one token; the first and the last are longer.
_TOKEN_BYTES = 32
_MORE_BYTES = 4096


class _Comment(msgspec.Struct):
    tokens: list[int]
    seed: int | None = None
    prompt: str = ""
    id: str = ""
    created: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    usage: dict[str, Any] | None = None


_DECODER = msgspec.json.Decoder(list[_Comment])


class ResumePoint(msgspec.Struct, frozen=True):
    """The progress of a stream: the sum of its resume comments."""

    tokens: list[int]
    is_finished: bool
    """True if the client got the finish reason."""
    _fleet: dict[str, Any]

    def resume_body(self, body: bytes) -> bytes:
        """Return the body that makes another engine continue; `body` is the original one, a JSON object."""
        fleet = orjson.dumps({"tokens": self.tokens, **self._fleet})
        return b'%b,"%b":%b}' % (body[: body.rindex(b"}")], streams.RESUME_FIELD.encode(), fleet)


class ResumeLog:
    """Resume comments of one stream."""

    __slots__ = ("_dropped_count", "_limit", "_raw", "events", "fault", "is_lost")

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: the number of tokens to keep, at about 20 bytes each."""
        self.fault: bytes | None = None
        """The event with which the engine gave up, or invalid input; nothing after it is read."""
        self.events = 0
        """The number of events without faults."""
        self.is_lost = False
        """True if the stream had more tokens than are kept."""
        self._limit = max_tokens * _TOKEN_BYTES + _MORE_BYTES
        self._raw = bytearray()
        self._dropped_count = 0

    @staticmethod
    def has_comments(events: bytes) -> bool:
        """Return whether a stream that begins with these events has resume comments."""
        return events.startswith(_COMMENT)

    def take(self, events: bytes) -> bytes:
        """Store the comments of complete events; return the events without them, up to a `fault`."""
        # Nearly always there is one event, a chunk, found here with the fewest calls.
        at = events.find(_CHUNK) + 1
        if at and events.find(b"\n", at) == len(events) - 2 and events.startswith(_COMMENT):
            self.events += 1
            self._raw += events[_PREFIX:at]
            if len(self._raw) > self._limit:
                self._drop_middle()
            return events[at:]
        found = _COMMON_EVENTS.findall(events)
        if found:
            comments, data = zip(*found, strict=True)
            raw, clean = b"".join(comments), b"".join(data)
            # If these are all of the bytes, there is nothing else. A match excludes the prefix.
            if len(raw) + len(clean) + _PREFIX * (len(comments) - comments.count(b"")) == len(
                events
            ):
                self.events += len(data)
                self._raw += raw
                if len(self._raw) > self._limit:
                    self._drop_middle()
                return clean
        return self._take_each(events)

    def _take_each(self, events: bytes) -> bytes:
        clean: list[bytes] = []
        *whole, rest = events.split(b"\n\n")
        if rest:
            self.fault = rest[:100]  # too large for an event
        for event in whole:
            at = event.find(_CHUNK) + 1
            data = event
            if at and event.startswith(_COMMENT):
                data = event[at:]
            if b"\n" in data or not data.startswith(_KNOWN):
                self.fault = event
                break
            if data is not event:
                self._raw += event[_PREFIX:at]
                if len(self._raw) > self._limit:
                    self._drop_middle()
            clean.append(data)
        self.events += len(clean)
        clean.append(b"")
        return b"\n\n".join(clean)

    def _drop_middle(self) -> None:
        self.is_lost = True
        # The first comment has the usage of the prompt, the last that of the answer; nearly all
        # others have one token.
        first = self._raw.index(b"\n") + 1
        last = self._raw.rindex(b"\n", 0, -1) + 1
        if first < last:
            self._dropped_count += self._raw.count(b"\n", first, last)
            del self._raw[first:last]

    def last(self) -> bytes:
        """Return the last comment; at the end of an answer it has the usage."""
        return bytes(self._raw[self._raw.rfind(b"\n", 0, -1) + 1 :])

    def usage(self) -> tuple[int, int, int]:
        """Return the approximate tokens of the prompt, its cached part, and the answer so far."""
        comments = self._comments()
        if not comments:
            return 0, 0, 0
        made = sum(len(comment.tokens) for comment in comments)
        return comments[0].prompt_tokens, comments[0].cached_tokens, made + self._dropped_count

    def _comments(self) -> list[_Comment]:
        try:
            return _DECODER.decode(b"[%b]" % bytes(self._raw[:-1]).replace(b"\n", b","))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return []

    def resume_point(self) -> ResumePoint | None:
        """Return the progress; None if it is not known or invalid."""
        comments = [] if self.is_lost else self._comments()
        if not comments or comments[0].seed is None:
            return None
        first, last = comments[0], comments[-1]
        return ResumePoint(
            [token for comment in comments for token in comment.tokens],
            last.usage is not None,
            {
                "seed": first.seed,
                "prompt": first.prompt,
                "id": first.id,
                "created": first.created,
                "cached_tokens": first.cached_tokens,
            },
        )


def parse_fault(fault: bytes) -> tuple[str, bool]:
    """Return the message of a fault, and whether another engine may succeed.

    A server_error is the engine's (it drains or failed), except request_timeout. Any other error
    would occur elsewhere too.
    """
    if not fault.startswith(_ERROR):
        return "the engine sent invalid data", True
    try:
        error = orjson.loads(fault[len(b"data: ") :])["error"]
        message, kind, code = (str(error.get(name)) for name in ("message", "type", "code"))
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError):
        return "the engine sent invalid data", True
    return message, kind == "server_error" and code != "request_timeout"
