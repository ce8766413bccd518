"""Spans of an answer's text, and the stop-word matcher that cuts them.

Every parser in this folder takes text in and returns all of it, in order and cut into spans. Nothing is lost or
moved, so every character that a client sees can be traced back to the tokens that spell it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple


class SpanRole(Enum):
    """Destination of a piece of text."""

    CONTENT = auto()
    REASONING = auto()
    HIDDEN = auto()
    """A marker and the blanks around it, the spelling of a tool call, a stop word and all text after it."""


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a tool call."""

    name: str | None
    """Set on the first piece of a call."""
    arguments: str
    """JSON, or the next part of it."""
    is_complete: bool
    """True if this is the last piece."""


class Span(NamedTuple):
    """A piece of text, with the pieces of tool calls that it completes. A tuple: every token makes some."""

    role: SpanRole
    text: str
    calls: tuple[CallPiece, ...] = ()


class StopMatcher:
    """Passes text through until a stop word is complete, and holds back what may become one.

    Stop words are matched on text, as the API promises, and never on tokens. The output does not depend on how the
    text is cut into pieces: the stop word that completes first wins, and of those that end together the longest.
    """

    def __init__(self, stops: Sequence[str], *, ends: Sequence[str] = ()) -> None:
        """Take the client's stop words, and other texts that end an answer."""
        self._named = tuple(stops)
        self._stops = (*self._named, *ends)
        self._longest = max(map(len, self._stops), default=0)
        self._firsts = frozenset(stop[:1] for stop in self._stops)
        self._held = ""
        self.is_stopped = False
        """True once a stop word was found: all later text is dropped."""
        self.matched: str | None = None
        """The client's stop word that was found."""

    @property
    def held(self) -> str:
        """Text that may become a stop word and is not shown yet."""
        return self._held

    def feed(self, text: str) -> str:
        """Add text; return the part that can be shown now."""
        if self.is_stopped:
            return ""
        if not self._stops:
            return text
        pending = self._held + text
        hits = [(at + len(stop), at) for stop in self._stops if (at := pending.find(stop)) >= 0]
        if hits:
            self.is_stopped = True
            self._held = ""
            end, start = min(hits)
            stop = pending[start:end]
            self.matched = stop if stop in self._named else None
            return pending[:start]
        kept = self._partial_stop_length(pending)
        self._held = pending[len(pending) - kept :]
        return pending[: len(pending) - kept]

    def spans(self, span: Span) -> Sequence[Span]:
        """Add text as `feed` does; return the shown span, and the hidden one after a stop word."""
        if not self._stops:
            return (span,)
        pending = self._held + span.text
        shown = Span(SpanRole.CONTENT, self.feed(span.text))
        if self.is_stopped:
            return (shown, Span(SpanRole.HIDDEN, pending[len(shown.text) :]))
        return (shown,)

    def flush(self) -> str:
        """Return the text that was held back: no more text follows, so it is no stop word."""
        held, self._held = self._held, ""
        return held

    def _partial_stop_length(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that begins a stop word."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[at] in self._firsts and any(stop.startswith(text[at:]) for stop in self._stops):
                return len(text) - at
        return 0
