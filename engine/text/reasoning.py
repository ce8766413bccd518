"""Parser that separates a model's reasoning from its answer by the markers around it. Pure: no mlx, no I/O."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from engine.text.spans import Span, SpanRole, partial_marker_length, trailing_blank_length


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingMarkers:
    """The texts before and after a model's reasoning, such as `<think>` and `</think>`."""

    start: str
    end: str


class ThinkingState(Enum):
    """The state in which a prompt leaves the reasoning."""

    OPEN = auto()
    """The template wrote the start marker."""
    FREE = auto()
    """The model may write the start marker itself."""
    CLOSED = auto()
    """The template wrote both markers: the model must not reason."""
    CONTINUED_REASONING = auto()
    """The prompt ends within reasoning that the client began; the next character is part of it, a blank, too."""
    CONTINUED_ANSWER = auto()
    """The prompt ends within an answer that the client began."""

    @property
    def is_open(self) -> bool:
        """Return whether the prompt ends within reasoning."""
        return self in (ThinkingState.OPEN, ThinkingState.CONTINUED_REASONING)

    @property
    def may_think(self) -> bool:
        """Return whether reasoning may follow the prompt."""
        return self.is_open or self is ThinkingState.FREE


def thinking_state(tail: str, markers: ThinkingMarkers) -> ThinkingState:
    """Return the state at the end of a prompt. Earlier markers do not count: users may write them, too."""
    end = tail.rstrip()
    if end.endswith(markers.start):
        return ThinkingState.OPEN
    return ThinkingState.CLOSED if end.endswith(markers.end) else ThinkingState.FREE


def continued_state(text: str, markers: ThinkingMarkers | None) -> ThinkingState:
    """Return the state after the beginning of an answer, which the model continues."""
    if markers is not None and text.rfind(markers.start) > text.rfind(markers.end):
        return ThinkingState.CONTINUED_REASONING
    return ThinkingState.CONTINUED_ANSWER


class _ParserState(Enum):
    START = auto()
    REASONING_START = auto()
    REASONING = auto()
    ANSWER_START = auto()
    ANSWER = auto()


class ReasoningParser:
    """Cuts text into reasoning and content; blanks next to markers are hidden.

    Reasoning is only what precedes all content: an answer may mention the markers.
    """

    def __init__(self, markers: ThinkingMarkers | None, prompt_state: ThinkingState) -> None:
        self._markers = markers
        self._held = ""
        self._state = _ParserState.START
        if prompt_state is ThinkingState.CLOSED:
            self._state = _ParserState.ANSWER_START
        elif markers is None or prompt_state is ThinkingState.CONTINUED_ANSWER:
            self._state = _ParserState.ANSWER
        elif prompt_state is ThinkingState.OPEN:
            self._state = _ParserState.REASONING_START
        elif prompt_state is ThinkingState.CONTINUED_REASONING:
            self._state = _ParserState.REASONING

    @property
    def is_thinking(self) -> bool:
        """Return whether the text so far ends within reasoning."""
        return self._state in (_ParserState.REASONING_START, _ParserState.REASONING)

    def feed(self, text: str) -> Iterator[Span]:
        """Add text; yield the spans that are decided."""
        self._held += text
        while self._held:
            before = (self._state, self._held)
            yield from self._step()
            if (self._state, self._held) == before:
                return

    def flush(self) -> Iterator[Span]:
        """Yield the text that was held back: no more text follows."""
        held, self._held = self._held, ""
        if self.is_thinking:
            kept = len(held) - trailing_blank_length(held)
            yield Span(SpanRole.REASONING, held[:kept])
            yield Span(SpanRole.HIDDEN, held[kept:])
        else:
            is_hidden = self._state is _ParserState.ANSWER_START
            yield Span(SpanRole.HIDDEN if is_hidden else SpanRole.CONTENT, held)

    def _step(self) -> Iterator[Span]:
        if self._state is _ParserState.ANSWER:
            yield self._cut(len(self._held), SpanRole.CONTENT)
        elif self._state is _ParserState.START:
            yield from self._find_start()
        elif self._state is _ParserState.REASONING:
            yield from self._find_end()
        else:
            yield from self._skip_blanks()

    def _skip_blanks(self) -> Iterator[Span]:
        """Hide the blanks after a marker."""
        rest = self._held.lstrip()
        yield self._cut(len(self._held) - len(rest), SpanRole.HIDDEN)
        if rest:
            self._state = (
                _ParserState.REASONING
                if self._state is _ParserState.REASONING_START
                else _ParserState.ANSWER
            )

    def _find_start(self) -> Iterator[Span]:
        assert self._markers is not None
        marker, rest = self._markers.start, self._held.lstrip()
        if rest.startswith(marker):
            self._state = _ParserState.REASONING_START
            yield self._cut(len(self._held) - len(rest) + len(marker), SpanRole.HIDDEN)
        elif rest and not marker.startswith(rest):
            self._state = _ParserState.ANSWER

    def _find_end(self) -> Iterator[Span]:
        assert self._markers is not None
        marker = self._markers.end
        at = self._held.find(marker)
        if at < 0:
            decided = len(self._held) - partial_marker_length(self._held, marker)
            blanks = trailing_blank_length(self._held[:decided])
            yield self._cut(decided - blanks, SpanRole.REASONING)
            return
        kept = at - trailing_blank_length(self._held[:at])
        yield self._cut(kept, SpanRole.REASONING)
        yield self._cut(at - kept + len(marker), SpanRole.HIDDEN)
        self._state = _ParserState.ANSWER_START

    def _cut(self, length: int, role: SpanRole) -> Span:
        piece, self._held = self._held[:length], self._held[length:]
        return Span(role, piece)
