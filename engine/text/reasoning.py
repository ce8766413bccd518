"""What a model thinks before it answers, told from the answer by the markers around it. Pure: no mlx, no I/O."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from engine.text.spans import Span, SpanRole, partial_marker_length, trailing_blank_length


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingMarkers:
    """The markers a model thinks between."""

    start: str
    end: str


class ThinkingState(Enum):
    """How a prompt leaves it to the model."""

    OPEN = auto()
    """The template opened the thinking."""
    FREE = auto()
    """The model may open it itself."""
    CLOSED = auto()
    """The template opened and closed it: the model shall not think."""


def thinking_state(tail: str, thinking: ThinkingMarkers) -> ThinkingState:
    """Return what the end of a prompt says. The end only: users may write markers, too."""
    end = tail.rstrip()
    if end.endswith(thinking.start):
        return ThinkingState.OPEN
    return ThinkingState.CLOSED if end.endswith(thinking.end) else ThinkingState.FREE


class _ParserState(Enum):
    START = auto()
    THOUGHT_START = auto()
    THOUGHT = auto()
    ANSWER_START = auto()
    ANSWER = auto()


class ReasoningParser:
    """Cuts text into reasoning and content; blanks next to markers are neither.

    Only what stands before all content is reasoning: an answer may speak of the markers.
    """

    def __init__(self, thinking: ThinkingMarkers | None, how: ThinkingState) -> None:
        self._thinking = thinking
        self._held = ""
        self._at = _ParserState.START
        if thinking is None or how is ThinkingState.CLOSED:
            self._at = (
                _ParserState.ANSWER_START if how is ThinkingState.CLOSED else _ParserState.ANSWER
            )
        elif how is ThinkingState.OPEN:
            self._at = _ParserState.THOUGHT_START

    @property
    def is_thinking(self) -> bool:
        """Whether the text is within a thought."""
        return self._at in (_ParserState.THOUGHT_START, _ParserState.THOUGHT)

    def feed(self, text: str) -> Iterator[Span]:
        """Take the next text; yield what is decided."""
        self._held += text
        while self._held:
            before = (self._at, self._held)
            yield from self._step()
            if (self._at, self._held) == before:
                return

    def flush(self) -> Iterator[Span]:
        """Yield what was held back: the text is over."""
        held, self._held = self._held, ""
        if self._at in (_ParserState.THOUGHT, _ParserState.THOUGHT_START):
            kept = len(held) - trailing_blank_length(held)
            yield Span(SpanRole.REASONING, held[:kept])
            yield Span(SpanRole.HIDDEN, held[kept:])
        else:
            hidden = self._at is _ParserState.ANSWER_START
            yield Span(SpanRole.HIDDEN if hidden else SpanRole.CONTENT, held)

    def _step(self) -> Iterator[Span]:
        if self._at is _ParserState.ANSWER:
            yield self._cut(len(self._held), SpanRole.CONTENT)
        elif self._at is _ParserState.START:
            yield from self._start()
        elif self._at is _ParserState.THOUGHT:
            yield from self._thought()
        else:
            yield from self._blanks()

    def _blanks(self) -> Iterator[Span]:
        """Pass over the blanks behind a marker."""
        rest = self._held.lstrip()
        yield self._cut(len(self._held) - len(rest), SpanRole.HIDDEN)
        if rest:
            self._at = (
                _ParserState.THOUGHT
                if self._at is _ParserState.THOUGHT_START
                else _ParserState.ANSWER
            )

    def _start(self) -> Iterator[Span]:
        assert self._thinking is not None
        marker, rest = self._thinking.start, self._held.lstrip()
        if rest.startswith(marker):
            self._at = _ParserState.THOUGHT_START
            yield self._cut(len(self._held) - len(rest) + len(marker), SpanRole.HIDDEN)
        elif rest and not marker.startswith(rest):
            self._at = _ParserState.ANSWER

    def _thought(self) -> Iterator[Span]:
        assert self._thinking is not None
        marker = self._thinking.end
        at = self._held.find(marker)
        if at < 0:
            sure = len(self._held) - partial_marker_length(self._held, marker)
            yield self._cut(sure - trailing_blank_length(self._held[:sure]), SpanRole.REASONING)
            return
        kept = at - trailing_blank_length(self._held[:at])
        yield self._cut(kept, SpanRole.REASONING)
        yield self._cut(at - kept + len(marker), SpanRole.HIDDEN)
        self._at = _ParserState.ANSWER_START

    def _cut(self, length: int, role: SpanRole) -> Span:
        piece, self._held = self._held[:length], self._held[length:]
        return Span(role, piece)
