"""Streams of stand-ins, which spell resume records as comments, in the frames of the engine link; and back.

A stand-in writes one text that is easy to cut: `: fleet {JSON}` before the data of a chunk, or in streams of
/v1/responses in a block of its own behind the events that it counts.
"""

from typing import Any

import orjson

from machinery import engine_link
from machinery.engine_link import Failure, ResumeRecord, ResumeStart

COMMENT = b": fleet "
_EVENT = (b"data: {", b"data: [DONE]", b"event: ", b": ")


def record_of(fields: dict[str, Any], events: int = 0) -> bytes:
    """Return the record that a comment spells."""
    start = None
    if "seed" in fields:
        names = ("seed", "prompt", "id", "created", "prompt_tokens", "cached_tokens")
        start = ResumeStart(*(fields.get(name, 0) for name in names))
    choice, usage = fields.get("choice", 0), fields.get("usage")
    tokens = {choice: fields["tokens"]} if fields["tokens"] else {}
    finished = [] if usage is None else [choice]
    output = None if usage is None else usage["completion_tokens"]
    return engine_link.encode_head(ResumeRecord(tokens, start, finished, output, events))


class CommentReader:
    """Turns the bytes of one stream into frames of a link."""

    def __init__(self, resumed_events: int = 0) -> None:
        self._rest = b""
        self._events = resumed_events
        self._is_marked: bool | None = None
        self._held = b""
        """Events whose record has not come."""
        self._start: dict[str, Any] = {}
        """Fields of a comment before all events."""

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Return the frames of the events that are complete."""
        data, self._rest = self._rest + data, b""
        if self._is_marked is None:
            if COMMENT.startswith(data):
                self._rest = data
                return []
            self._is_marked = data.startswith(COMMENT)
        if not self._is_marked:
            return [(engine_link.EVENTS, data)]
        *events, self._rest = data.split(b"\n\n")
        frames = []
        for event in events:
            frames += self._frame(event)
        return frames

    def _frame(self, event: bytes) -> list[tuple[int, bytes]]:
        comment, _, rest = event.partition(b"\n")
        if not event.startswith(COMMENT):
            if not event.startswith(_EVENT):
                return [(engine_link.FAIL, engine_link.encode_head(Failure("no event")))]
            if event.startswith(b'data: {"error"'):
                return [(engine_link.FAIL, _failure(event[6:], event + b"\n\n"))]
            self._held += event + b"\n\n"
            self._events += 1
            if not event.startswith((b"data: [DONE]", b": ")):
                return []
            fields, self._start = self._start, {}
            return self._recorded(record_of(fields) if fields else b"")
        fields = orjson.loads(comment[len(COMMENT) :])
        if "error" in fields:
            return [(engine_link.FAIL, _failure(orjson.dumps(fields), self._held))]
        if rest:
            self._held += rest + b"\n\n"
            if b'"choices":[]' in rest:  # the usage and the end are one write of an engine
                self._start = fields
                return []
            return self._recorded(record_of(fields))
        if not self._held:  # the first block of a response, before its events
            self._start = fields
            return []
        fields, self._start = {**self._start, **fields}, {}
        return self._recorded(record_of(fields, self._events))

    def _recorded(self, record: bytes) -> list[tuple[int, bytes]]:
        events, self._held = self._held, b""
        return [(engine_link.RECORDED, engine_link.encode_recorded(record, events))]


def _failure(error: bytes, event: bytes) -> bytes:
    fields = orjson.loads(error)["error"]
    is_own = fields["type"] == "server_error" and fields.get("code") != "request_timeout"
    return engine_link.encode_head(Failure(fields["message"], b"" if is_own else event))
