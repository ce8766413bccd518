"""Parser that separates a model's reasoning from its answer by the markers around it. Pure: no mlx, no I/O."""

import re
from dataclasses import dataclass
from enum import Enum, auto

from engine.text.formats.literals import skip_blanks
from engine.text.formats.reader import Delimiter, Reader, Steps
from engine.text.spans import SpanRole


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


def read_reasoning(
    reader: Reader, markers: ThinkingMarkers | None, prompt_state: ThinkingState
) -> Steps[None]:
    """Read the reasoning at the beginning of an answer; blanks next to markers are hidden.

    Reasoning is only what precedes all content: an answer may mention the markers.
    """
    if prompt_state is ThinkingState.CLOSED:
        yield from skip_blanks(reader)
        return
    if markers is None or prompt_state is ThinkingState.CONTINUED_ANSWER:
        return
    if prompt_state is ThinkingState.FREE:
        marker = markers.start.lstrip()
        start = Delimiter({marker: ""})
        while True:
            reader.hold(reader.blanks_end())
            is_start = start.here(reader.text, reader.at)
            if is_start or is_start is None or reader.is_final:
                break
            yield None
        if not is_start:
            yield reader.release(SpanRole.CONTENT)
            return
        reader.hold(reader.at + len(marker))
        yield reader.release(SpanRole.HIDDEN)
    reader.is_thinking = True
    if prompt_state is not ThinkingState.CONTINUED_REASONING:
        yield from skip_blanks(reader)
    end = yield from read_trimmed(reader, Delimiter({markers.end: ""}), SpanRole.REASONING)
    if end is None:
        return
    reader.is_thinking = False
    yield reader.take(end.end())
    yield from skip_blanks(reader)


def read_trimmed(
    reader: Reader, delimiter: Delimiter, role: SpanRole
) -> Steps[re.Match[str] | None]:
    """Yield the text before a delimiter without the blanks at its end; return the delimiter, as `Reader.until` does."""
    while True:
        end, match = delimiter.search(reader.text, reader.at, is_final=reader.is_final)
        text_end = reader.at + len(reader.text[reader.at : end].rstrip())
        if text_end > reader.at:
            reader.hold(text_end)
            yield reader.release(role)
        reader.hold(end)
        if match is not None or reader.is_final:
            yield reader.release(SpanRole.HIDDEN)
            return match
        yield None
