"""Resume records of one answer, from which another engine can continue it.

A record comes beside the events of its tokens (machinery/engine_link.py; docs/internals/engine.md, "Continuing an answer
elsewhere"). They are stored undecoded, because only the death of an engine needs them.
"""

from typing import Any

import msgspec
import orjson

from gateway.metrics.response_summary import TokenCounts
from machinery import engine_link
from machinery.engine_link import LinkError, ResumeRecord
from schemas.wire import streams

# Bytes of a record with one token; the first and the last are longer.
_TOKEN_BYTES = 16
_MORE_BYTES = 4096


class ResumePoint(msgspec.Struct, frozen=True):
    """The progress of an answer: the sum of its resume records."""

    choices: list[list[int]]
    """Tokens of each choice."""
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
    """Resume records of one answer."""

    __slots__ = ("_count", "_dropped_count", "_first", "_last", "_limit", "_raw", "is_lost")

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: the number of tokens to keep, at about 10 bytes each."""
        self.is_lost = False
        """True if the answer had more tokens than are kept."""
        self._limit = max_tokens * _TOKEN_BYTES + _MORE_BYTES
        self._first = self._last = b""
        self._raw = bytearray()
        """All records but the first."""
        self._count = 0
        """The number of records in `_raw`."""
        self._dropped_count = 0

    def add(self, record: bytes) -> None:
        """Store a record; an empty one is none."""
        if not record:
            return
        self._last = record
        if not self._first:
            self._first = record
            return
        self._raw += record
        self._count += 1
        if len(self._raw) > self._limit:
            # The first record has the usage of the prompt, the last that of the answer; nearly all others have one token.
            self.is_lost = True
            self._dropped_count += self._count - 1
            self._raw, self._count = bytearray(record), 1

    def usage(self) -> TokenCounts:
        """Return the tokens of the prompt, its cached part, and the answer so far, which are approximate if it is lost."""
        ends = _decode(self._first + self._last, 2)
        if not ends or ends[0].start is None:
            return 0, 0, 0
        start, output = ends[0].start, ends[1].output_tokens
        if output is None:
            output = self._dropped_count
            output += sum(len(ids) for record in self._records() for ids in record.tokens.values())
        return start.prompt_tokens, start.cached_tokens, output

    def _records(self) -> list[ResumeRecord]:
        return _decode(self._first + self._raw, self._count + 1)

    def resume_point(self, count: int = 1) -> ResumePoint | None:
        """Return the progress of so many choices; None if it is not known or invalid."""
        records = self._records()
        if self.is_lost or not records or records[0].start is None:
            return None
        start = records[0].start
        choices: list[list[int]] = [[] for _ in range(count)]
        finished: list[int] = []
        for record in records:
            for choice, tokens in record.tokens.items():
                if not 0 <= choice < count:
                    return None
                choices[choice] += tokens
            finished += record.finished
        events = max(record.events for record in records)
        return ResumePoint(
            choices,
            {
                **({"finished": finished} if finished else {}),
                "seed": start.seed,
                "prompt": start.prompt,
                "id": start.id,
                "created": start.created,
                "cached_tokens": start.cached_tokens,
                **({"events": events} if events else {}),
            },
        )


def _decode(records: bytes, count: int) -> list[ResumeRecord]:
    """Return so many records; none if they are not valid."""
    try:
        return engine_link.decode_records(records, count)
    except LinkError:
        return []
