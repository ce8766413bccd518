"""What a client may see of an answer, piece by piece. Values only.

One answer's way from tokens to deltas: characters, reasoning, tool calls, stop words. No mlx here.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Self, TypeAlias

from engine.jobs import TokenLogprobs, TokenOutput
from engine.ports import Detokenizer
from engine.text.reasoning import ReasoningParser, ThinkingState
from engine.text.spans import CallPiece, Span, SpanRole, StopMatcher
from engine.text.tool_calls import ToolCallParser


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """A piece of a call; the first of a call carries its id and name, all may carry arguments (JSON, in parts)."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredToken:
    """A token that was made, and how likely it was."""

    token: int
    likelihood: TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one or several tokens add to an answer; all of it may be empty while a stop word or a marker is open."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    scored: tuple[ScoredToken, ...] = ()
    """The tokens whose text is in `content`."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return not (self.content or self.reasoning or self.tool_calls or self.scored)

    @classmethod
    def joined(cls, parts: Iterable[Self]) -> Self:
        """Return several deltas of one choice as one."""
        deltas = list(parts)
        if len(deltas) == 1:  # nearly always, and this is on the way of every token
            return deltas[0]
        return cls(
            content="".join(delta.content for delta in deltas),
            reasoning="".join(delta.reasoning for delta in deltas),
            tool_calls=tuple(call for delta in deltas for call in delta.tool_calls),
            scored=tuple(one for delta in deltas for one in delta.scored),
        )


# OpenAI's `finish_reason`; the worker knows only the first two.
Finish: TypeAlias = Literal["stop", "length", "tool_calls"]


@dataclass(slots=True)
class _TokenTrace:
    """Which tokens a piece of text was made of."""

    _unspelled: list[ScoredToken] = field(default_factory=list)
    _groups: deque[tuple[int, int, list[ScoredToken]]] = field(default_factory=deque)
    _read: int = 0
    _decided: int = 0

    def made(self, scored: ScoredToken) -> None:
        """Hear of a token; its text may come with a later one's."""
        self._unspelled.append(scored)

    def spelled(self, text: str) -> None:
        """Hear of the text of all tokens since the last text."""
        if not text:
            return
        end = self._read + len(text)
        if self._unspelled:
            self._groups.append((self._read, end, self._unspelled))
            self._unspelled = []
        self._read = end

    @property
    def open(self) -> int:
        """How many tokens there are of whose text nothing is decided."""
        begun = sum(len(tokens) for begin, _, tokens in self._groups if begin >= self._decided)
        return begun + len(self._unspelled)

    def decided(self, span: Span) -> list[ScoredToken]:
        """Hear what becomes of the next characters; return the tokens that a client sees with them first."""
        begin, end = self._decided, self._decided + len(span.text)
        self._decided = end
        shown: list[ScoredToken] = []
        while self._groups and self._groups[0][1] <= begin:
            self._groups.popleft()
        while span.role is SpanRole.CONTENT and self._groups and self._groups[0][0] < end:
            shown += self._groups.popleft()[2]
        return shown


@dataclass(slots=True, kw_only=True)
class OutputParser:
    """Reads what one job makes. Deterministic: the same tokens always give the same deltas."""

    detokenizer: Detokenizer
    stops: StopMatcher
    """For content alone: neither for reasoning nor for calls."""
    thoughts: ReasoningParser = field(
        default_factory=lambda: ReasoningParser(None, ThinkingState.FREE)
    )
    calls: ToolCallParser = field(default_factory=lambda: ToolCallParser(dialect=None))
    is_parallel: bool = True
    """Whether the answer may go on after its first call."""
    call_seed: str = ""
    """What the ids of calls are derived from."""
    finish: Finish | None = None
    tokens: list[int] = field(default_factory=list)
    reasoning_tokens: int = 0
    """How many of them were read in a thought, its end included."""
    _called: int = 0
    _completed: int = 0
    _told: int = 0
    _trace: _TokenTrace = field(default_factory=_TokenTrace)

    @property
    def is_over(self) -> bool:
        """Whether nothing can be added."""
        return self.finish is not None

    @property
    def open_tokens(self) -> int:
        """How many of the last tokens come with likelihoods of which it is open whether they will be told."""
        return self._trace.open

    def prime(self, tokens: Iterable[int]) -> None:
        """Read what is not to be shown: a completion continues its prompt, so its first blank stays."""
        for token in tokens:
            self.detokenizer.add_token(token)
        _ = self.detokenizer.last_segment

    def take(self, made: TokenOutput) -> Delta:
        """Read one more token. After it, `finish` may be set before the worker's own end came."""
        was_thinking = self.thoughts.is_thinking
        self.tokens.append(made.token)
        if made.finish != "stop":  # the end token itself is no text
            self.detokenizer.add_token(made.token)
            if made.likelihood is not None:
                self._trace.made(ScoredToken(token=made.token, likelihood=made.likelihood))
        if made.finish is not None:
            self.detokenizer.finalize()
        text = self.detokenizer.last_segment
        self._trace.spelled(text)
        spans = [span for span in self._spans(text, is_last=made.finish is not None) if span.text]
        delta = Delta.joined([self._delta(span) for span in spans])
        self.reasoning_tokens += was_thinking or self.thoughts.is_thinking
        self.finish = self._finish(made)
        return delta

    @property
    def _is_cut(self) -> bool:
        """Whether all further text is hidden."""
        return self.stops.is_stopped or (self._completed > 0 and not self.is_parallel)

    def _finish(self, made: TokenOutput) -> Finish | None:
        if self._is_cut or made.finish == "stop":
            return "tool_calls" if self._called else "stop"
        return made.finish

    def _spans(self, text: str, *, is_last: bool) -> Iterator[Span]:
        for span in self.thoughts.feed(text):
            yield from self._answer(span)
        if not is_last:
            return
        for span in self.thoughts.flush():
            yield from self._answer(span)
        for span in self.calls.flush():
            yield from self._content(span)
        yield Span(SpanRole.CONTENT, self.stops.flush())

    def _answer(self, span: Span) -> Iterator[Span]:
        if span.role is not SpanRole.CONTENT:
            yield span
            return
        for part in self.calls.feed(span.text):
            yield from self._content(part)

    def _content(self, span: Span) -> Iterator[Span]:
        if self._is_cut:
            yield Span(SpanRole.HIDDEN, span.text)
        elif span.role is not SpanRole.CONTENT or span.calls:
            # No stop word goes over a call.
            yield Span(SpanRole.CONTENT, self.stops.flush())
            yield self._counted(span)
        else:
            yield from self.stops.spans(span.text)

    def _counted(self, span: Span) -> Span:
        calls: list[CallPiece] = []
        for piece in span.calls:
            if not self._is_cut:
                calls.append(piece)
            self._called += piece.name is not None
            self._completed += piece.is_complete
        return Span(span.role, span.text, tuple(calls))

    def _delta(self, span: Span) -> Delta:
        scored = tuple(self._trace.decided(span))
        if span.role is SpanRole.CONTENT:
            return Delta(content=span.text, scored=scored)
        if span.role is SpanRole.REASONING:
            return Delta(reasoning=span.text)
        shown = [call for call in span.calls if call.name is not None or call.arguments]
        return Delta(tool_calls=tuple(self._call(call) for call in shown))

    def _call(self, call: CallPiece) -> ToolCallDelta:
        if call.name is None:
            return ToolCallDelta(index=self._told - 1, arguments=call.arguments)
        index, self._told = self._told, self._told + 1
        # Derived: a process that takes an answer over gives its calls the same ids.
        digest = hashlib.blake2b(f"{self.call_seed}/{index}".encode(), digest_size=12).hexdigest()
        return ToolCallDelta(
            index=index, id=f"call_{digest}", name=call.name, arguments=call.arguments
        )
