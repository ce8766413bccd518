"""The marks of a stream: what its engine tells of how far it came, for another to go on. Pure; sends nothing.

A mark is a comment line in an event, before its data: docs/reference/openai.md, "Continuing an answer elsewhere". They
are taken out of what clients get and kept as they came; only the death of an engine is worth reading them.
"""

import re
from typing import Any

import msgspec
import orjson

_MARK = b": fleet "
# Engines begin each chunk with its id, and nothing else but the end, comments and errors.
_CHUNK = b'\ndata: {"id"'
_KNOWN = (b'data: {"id"', b"data: [DONE]", b":")
_ERROR = b'data: {"error"'
# Events that are just that, with marks or without: one step instead of several for each.
_USUAL = re.compile(
    rb'(?:: fleet ([^\n]*\n)(?=data: \{"id"))?(data: (?:\{"id"|\[DONE\])[^\n]*\n\n)'
)
# As many bytes as a mark with one token has; the first and the last are longer.
_TOKEN_BYTES = 32
_MORE_BYTES = 4096


class _Mark(msgspec.Struct):
    tokens: list[int]
    seed: int | None = None
    prompt: str = ""
    id: str = ""
    created: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    usage: dict[str, Any] | None = None


_DECODER = msgspec.json.Decoder(list[_Mark])


class ResumePoint(msgspec.Struct, frozen=True):
    """How far a stream came: the sum of its marks."""

    tokens: list[int]
    is_finished: bool
    """Whether the client was told why the answer is over."""
    _fleet: dict[str, Any]

    def continued(self, body: bytes) -> bytes:
        """Return the body of the request that has another engine go on; `body`, a JSON object, is the first one's."""
        fleet = orjson.dumps({"tokens": self.tokens, **self._fleet})
        return b'%b,"fleet":%b}' % (body[: body.rindex(b"}")], fleet)


class ResumeLog:
    """The marks of one stream."""

    __slots__ = ("_dropped", "_limit", "_raw", "events", "fault", "is_lost")

    def __init__(self, most_tokens: int) -> None:
        """`most_tokens`: of how many marks are kept; about 20 bytes each."""
        self.fault: bytes | None = None
        """The event with which the engine gave up, or that is none; what follows it is not looked at."""
        self.events = 0
        """How many there were, without faults."""
        self.is_lost = False
        """Whether there were more tokens than are kept."""
        self._limit = most_tokens * _TOKEN_BYTES + _MORE_BYTES
        self._raw = bytearray()
        self._dropped = 0

    @staticmethod
    def is_marked(events: bytes) -> bool:
        """Return whether a stream that begins like this has marks."""
        return events.startswith(_MARK)

    def take(self, events: bytes) -> bytes:
        """Keep the marks of whole events; return the events without them, up to one that is a `fault`."""
        # Nearly always there is one event, and it is a chunk: found with as few calls as can tell it.
        at = events.find(_CHUNK) + 1
        if at and events.find(b"\n", at) == len(events) - 2 and events.startswith(_MARK):
            self.events += 1
            self._raw += events[8:at]
            if len(self._raw) > self._limit:
                self._lose()
            return events[at:]
        found = _USUAL.findall(events)
        if found:
            marks, data = zip(*found, strict=True)
            raw, clean = b"".join(marks), b"".join(data)
            # Where these are all of the bytes, there is nothing else; a mark was found without its first 8.
            if len(raw) + len(clean) + 8 * (len(marks) - marks.count(b"")) == len(events):
                self.events += len(data)
                self._raw += raw
                if len(self._raw) > self._limit:
                    self._lose()
                return clean
        return self._several(events)

    def _several(self, events: bytes) -> bytes:
        clean: list[bytes] = []
        *whole, rest = events.split(b"\n\n")
        if rest:
            self.fault = rest[:100]  # too large to be an event
        for event in whole:
            at = event.find(_CHUNK) + 1
            data = event
            if at and event.startswith(_MARK):
                data = event[at:]
            if b"\n" in data or not data.startswith(_KNOWN):
                self.fault = event
                break
            if data is not event:
                self._raw += event[8:at]
                if len(self._raw) > self._limit:
                    self._lose()
            clean.append(data)
        self.events += len(clean)
        clean.append(b"")
        return b"\n\n".join(clean)

    def _lose(self) -> None:
        self.is_lost = True
        # The first mark has the prompt's usage, the last the answer's; nearly all others have one token.
        first = self._raw.index(b"\n") + 1
        last = self._raw.rindex(b"\n", 0, -1) + 1
        if first < last:
            self._dropped += self._raw.count(b"\n", first, last)
            del self._raw[first:last]

    def last(self) -> bytes:
        """Return the last mark: that of an answer's end has its usage."""
        return bytes(self._raw[self._raw.rfind(b"\n", 0, -1) + 1 :])

    def usage(self) -> tuple[int, int, int]:
        """Return the tokens of the prompt, those of it that were cached, and of the answer so far, about."""
        marks = self._marks()
        if not marks:
            return 0, 0, 0
        made = sum(len(mark.tokens) for mark in marks)
        return marks[0].prompt_tokens, marks[0].cached_tokens, made + self._dropped

    def _marks(self) -> list[_Mark]:
        try:
            return _DECODER.decode(b"[%b]" % bytes(self._raw[:-1]).replace(b"\n", b","))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return []

    def told(self) -> ResumePoint | None:
        """Return how far the stream came; None if that is not known any more, or makes no sense."""
        marks = [] if self.is_lost else self._marks()
        if not marks or marks[0].seed is None:
            return None
        first, last = marks[0], marks[-1]
        return ResumePoint(
            [token for mark in marks for token in mark.tokens],
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
    """Return what to say of a fault, and whether another engine may do better.

    Engines are to blame for a server_error (they are drained, or the model failed); its request_timeout is the client's
    own, and what is no server_error would be refused elsewhere, too.
    """
    if not fault.startswith(_ERROR):
        return "the engine sent something that is no event", True
    try:
        error = orjson.loads(fault[len(b"data: ") :])["error"]
        message, kind, code = (str(error.get(name)) for name in ("message", "type", "code"))
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError):
        return "the engine sent something that is no event", True
    return message, kind == "server_error" and code != "request_timeout"
