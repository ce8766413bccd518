"""Pieces of an answer's text and what becomes of each. Values only.

Every reader in this folder takes text in and gives all of it back, in order and cut into spans: nothing is lost
and nothing is moved, so what a client sees can be traced back to the tokens it was made of.

Stop words, matched on text as the API promises and never on tokens. Pure: no mlx, no I/O.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto


class SpanRole(Enum):
    """What becomes of a piece of text."""

    CONTENT = auto()
    REASONING = auto()
    HIDDEN = auto()
    """A marker, blanks around one, a call's own spelling, a stop word and all behind it."""


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a call."""

    name: str | None
    """With the first piece of a call."""
    arguments: str
    """JSON, or the next part of it."""
    is_complete: bool
    """Whether it is the last piece."""


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of text; `calls` is what of calls can be told with it."""

    role: SpanRole
    text: str
    calls: tuple[CallPiece, ...] = ()


def partial_marker_length(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` with which `marker` begins, but is not complete."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[len(text) - length :]):
            return length
    return 0


def trailing_blank_length(text: str) -> int:
    """Return how many blanks end a text."""
    return len(text) - len(text.rstrip())


class StopMatcher:
    """Passes text through until a stop word is complete, holding back what may become one.

    What comes out does not depend on how the text was cut into pieces: of several stop words the
    one that is complete first wins, and of those that end together the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._is_stopped = False
        self.matched: str | None = None
        """The stop word that was seen."""

    @property
    def is_stopped(self) -> bool:
        """Whether a stop word was seen; all later text is swallowed."""
        return self._is_stopped

    @property
    def held(self) -> str:
        """What may yet become a stop word, and is not shown so far."""
        return self._held

    def feed(self, text: str) -> str:
        """Take the next text and return what may be shown now."""
        if self._is_stopped:
            return ""
        seen = self._held + text
        hits = [(at + len(stop), at) for stop in self._stops if (at := seen.find(stop)) >= 0]
        if hits:
            self._is_stopped = True
            self._held = ""
            end, begin = min(hits)
            self.matched = seen[begin:end]
            return seen[:begin]
        keep = self._open_length(seen)
        self._held = seen[len(seen) - keep :]
        return seen[: len(seen) - keep]

    def spans(self, text: str) -> Iterator[Span]:
        """Take the next text as `feed` does; yield what is shown, and what is hidden for good."""
        seen = self._held + text
        shown = self.feed(text)
        yield Span(SpanRole.CONTENT, shown)
        if self._is_stopped:
            yield Span(SpanRole.HIDDEN, seen[len(shown) :])

    def flush(self) -> str:
        """Return what was held back: the text is over, so it cannot become a stop word."""
        held, self._held = self._held, ""
        return held

    def _open_length(self, text: str) -> int:
        """Return the length of the longest end of `text` with which a stop word begins."""
        longest = max((len(stop) for stop in self._stops), default=0)
        for length in range(min(longest - 1, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
