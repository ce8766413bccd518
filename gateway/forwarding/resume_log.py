"""Resume comments of an engine's stream, from which another engine can continue it.

A resume comment (": fleet {...}") precedes the data of a chunk, or follows the events of a token in a block of its own;
see docs/internals/engine.md, "Continuing an answer elsewhere". Comments are removed from the client's stream and stored
unparsed, because only the death of an engine needs them.
"""

import re
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import orjson
from typing_extensions import override

from machinery.http_chunks import CHUNK_END, SIZE_LINES
from schemas.wire import streams
from schemas.wire.streams import DONE, END

_COMMENT = streams.RESUME_COMMENT
_PREFIX = len(_COMMENT)
# Engines begin each chunk with its id. Only the end, comments and errors look different.
_BEGINNING = b'data: {"id"'
_BEGINNING_SIZE = len(_BEGINNING)
_CHUNK = b"\n" + _BEGINNING
_LINE_FEED = 10
_KNOWN = (_BEGINNING, b"data: [DONE]", b":")
# Chunks and [DONE], with or without comments (streams.RESUME_COMMENT): one match instead of several
# steps for each.
_COMMON_EVENTS = re.compile(
    rb'(?:: fleet ([^\n]*\n)(?=data: \{"id"))?(data: (?:\{"id"|\[DONE\])[^\n]*\n\n)'
)
# Bytes of a comment with one token; the first and the last are longer.
_TOKEN_BYTES = 32
_MORE_BYTES = 4096
# Comments that wait to be stored together.
_RECENT = 64
# Part of the last chunk after all text, which carries the usage.
_NO_CHOICES = b'"choices":[]'
# The comment with which an engine gives up, behind the event that tells its client.
_REFUSAL = _COMMENT + b'{"error"'
_NUMBERED = re.compile(rb"event: response\.[a-z_.]+\ndata: \{[^\n]*")
LARGEST = 16 << 20
"""Bytes of the largest event, and of events before their comment. The largest are batches of logprobs for slow
readers."""


class RelayedStream(Protocol):
    """The stream whose comments are stored."""

    rest: bytes
    """The beginning of the next event."""
    last: bytes
    """The last events that the client got."""

    def feed(self, piece: bytes) -> None:
        """Take a piece of the engine's response."""
        ...


class _Comment(msgspec.Struct):
    tokens: list[int]
    choice: int = 0
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

    choices: list[list[int]]
    """Tokens of each choice."""
    is_finished: bool
    """True if the client got the finish reason of every choice."""
    _fleet: dict[str, Any]

    @property
    def tokens(self) -> int:
        """The number of tokens of all choices."""
        return sum(map(len, self.choices))

    def resume_body(self, body: bytes) -> bytes:
        """Return the body that makes another engine continue; `body` is the original one, a JSON object."""
        of_one = len(self.choices) == 1
        tokens = {"tokens": self.choices[0]} if of_one else {"choices": self.choices}
        fleet = orjson.dumps({**tokens, **self._fleet})
        return b'%b,"%b":%b}' % (body[: body.rindex(b"}")], streams.RESUME_FIELD.encode(), fleet)


class ResumeLog:
    """Resume comments of one stream of chunks."""

    __slots__ = (
        "_dropped_count",
        "_limit",
        "_raw",
        "_recent",
        "events",
        "fault",
        "fault_event",
        "is_lost",
    )

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: the number of tokens to keep, at about 20 bytes each."""
        self.fault: bytes | None = None
        """The event with which the engine gave up, or invalid input; nothing after it is read."""
        self.fault_event = b""
        """The part of it for the client, if no other engine can help."""
        self.events = 0
        """The number of events without faults."""
        self.is_lost = False
        """True if the stream had more tokens than are kept."""
        self._limit = max_tokens * _TOKEN_BYTES + _MORE_BYTES
        self._raw = bytearray()
        self._recent: list[bytes] = []
        """Comments of relayed events, which are stored together."""
        self._dropped_count = 0

    @staticmethod
    def has_comments(events: bytes) -> bool:
        """Return whether a stream that begins with these events has resume comments."""
        return events.startswith(_COMMENT)

    @staticmethod
    def of(events: bytes, max_tokens: int) -> "ResumeLog | None":
        """Return the log of a stream that begins with these events; None if it has no resume comments."""
        if not events.startswith(_COMMENT):
            return None
        is_block = events.startswith(END, events.find(b"\n"))
        return NumberedResumeLog(max_tokens) if is_block else ResumeLog(max_tokens)

    def add(self, comment: bytes) -> None:
        """Store a comment, as JSON, that came without events."""
        self._store(comment + b"\n")

    def restart(self) -> None:
        """Expect the events of another engine, which continues the stream."""
        self.fault, self.fault_event = None, b""

    def missing_end(self, last: bytes) -> bytes:
        """Return the events that follow the last ones if nothing else is missing; empty if more is."""
        return DONE if _NO_CHOICES in last else b""

    def take(self, events: bytes) -> bytes:
        """Store the comments of complete events; return the events without them, up to a `fault`."""
        if self._recent:
            self._settle()
        # Nearly always there is one event, a chunk, found here with the fewest calls.
        at = events.find(_CHUNK) + 1
        if at and events.find(b"\n", at) == len(events) - 2 and events.startswith(_COMMENT):
            self.events += 1
            self._store(events[_PREFIX:at])
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
                self._store(raw)
                return clean
        return self._take_each(events)

    def relay(
        self, stream: RelayedStream, write: Callable[[bytes], object]
    ) -> Callable[[bytes], None]:
        """Return a function that does for one event what `take` does and writes it; `stream` is fed with all else."""
        # As in `take`, with the cheapest steps that there are: this runs for every token.
        recent = self._recent

        def relay(events: bytes) -> None:
            comment, _, event = events.partition(b"\n")
            if (
                comment[:_PREFIX] == _COMMENT
                and event[:_BEGINNING_SIZE] == _BEGINNING
                and event.find(b"\n") == len(event) - 2
                and event[-1] == _LINE_FEED
                and not stream.rest
            ):
                self.events += 1
                recent.append(comment)
                if len(recent) == _RECENT:
                    self._settle()
                stream.last = event
                write(b"".join((SIZE_LINES[len(event)], event, CHUNK_END)))
            else:
                stream.feed(events)

        return relay

    def _settle(self) -> None:
        """Store the comments of the relayed events."""
        if self._recent:
            comments = b"".join([comment[_PREFIX:] + b"\n" for comment in self._recent])
            self._recent.clear()
            self._store(comments)

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
                self.fault, self.fault_event = event, event + END
                break
            if data is not event:
                self._store(event[_PREFIX:at])
            clean.append(data)
        self.events += len(clean)
        clean.append(b"")
        return b"\n\n".join(clean)

    def _store(self, comments: bytes) -> None:
        self._raw += comments
        if len(self._raw) > self._limit:
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
        self._settle()
        return bytes(self._raw[self._raw.rfind(b"\n", 0, -1) + 1 :])

    def usage(self) -> tuple[int, int, int]:
        """Return the approximate tokens of the prompt, its cached part, and the answer so far."""
        comments = self._comments()
        if not comments:
            return 0, 0, 0
        made = sum(len(comment.tokens) for comment in comments)
        return comments[0].prompt_tokens, comments[0].cached_tokens, made + self._dropped_count

    def _comments(self) -> list[_Comment]:
        self._settle()
        try:
            return _DECODER.decode(b"[%b]" % bytes(self._raw[:-1]).replace(b"\n", b","))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return []

    def resume_point(self, count: int = 1) -> ResumePoint | None:
        """Return the progress of so many choices; None if it is not known or invalid."""
        comments = self._comments()
        if self.is_lost or not comments or comments[0].seed is None:
            return None
        choices: list[list[int]] = [[] for _ in range(count)]
        finished: list[int] = []
        for comment in comments:
            if not 0 <= comment.choice < count:
                return None
            choices[comment.choice] += comment.tokens
            if comment.usage is not None:
                finished.append(comment.choice)
        first, is_finished = comments[0], len(finished) == count
        # The next engine repeats the last end: its stream must begin with a comment.
        known = finished[:-1] if is_finished else finished
        return ResumePoint(
            choices,
            is_finished,
            {
                **({"finished": known} if known else {}),
                "seed": first.seed,
                "prompt": first.prompt,
                "id": first.id,
                "created": first.created,
                "cached_tokens": first.cached_tokens,
                **self._progress(),
            },
        )

    def _progress(self) -> dict[str, Any]:
        """Return what another engine needs besides the comments."""
        return {}


class NumberedResumeLog(ResumeLog):
    """Resume comments of one stream of /v1/responses, whose events are numbered.

    Several events belong to one token. They are held until the comment behind them has arrived, so that the client has
    all of them or none when the engine dies.
    """

    __slots__ = ("_held", "_held_bytes")

    def __init__(self, max_tokens: int) -> None:
        super().__init__(max_tokens)
        self._held: list[bytes] = []
        self._held_bytes = 0

    @override
    def restart(self) -> None:
        super().restart()
        self._held, self._held_bytes = [], 0

    @override
    def missing_end(self, last: bytes) -> bytes:
        return b""

    @override
    def relay(
        self, stream: RelayedStream, write: Callable[[bytes], object]
    ) -> Callable[[bytes], None]:
        return stream.feed  # several events belong to a comment

    @override
    def take(self, events: bytes) -> bytes:
        *whole, rest = events.split(END)
        clean: list[bytes] = []
        for event in whole:
            if event.startswith(_REFUSAL):
                self.fault, self.fault_event = b"data: " + event[_PREFIX:], _joined(self._held)
                break
            if event.startswith(_COMMENT):
                self._store(event[_PREFIX:] + b"\n")
                clean += self._held
                self._held, self._held_bytes = [], 0
                continue
            self._held.append(event)
            self._held_bytes += len(event)
            if self._held_bytes > LARGEST or not _NUMBERED.fullmatch(event):
                self.fault = event[:100] or b"an empty event"
                break
        else:
            if rest:
                self.fault = rest[:100]  # too large for an event
        self.events += len(clean)
        return _joined(clean)

    @override
    def _progress(self) -> dict[str, Any]:
        return {"events": self.events}


def _joined(events: list[bytes]) -> bytes:
    return b"".join(event + END for event in events)
