"""Parser of one answer: tokens in, deltas of text, reasoning and tool calls out. No mlx."""

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self, TypeAlias

import msgspec

from engine.jobs import FinishReason, TokenLogprobs, TokenOutput
from engine.text.formats.reader import AnswerParser, text_parser
from engine.text.interface import Detokenizer
from engine.text.spans import CallPiece, Span, SpanRole, StopMatcher


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a tool call. The first piece has the id and the name; each may have a part of the JSON arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class ScoredToken(msgspec.Struct, frozen=True, kw_only=True):
    """A generated token with its log probabilities."""

    token: int
    logprobs: TokenLogprobs


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """The addition of one or several tokens to an answer; empty while text is held back.

    A msgspec struct, as all that is made for each token is: a frozen dataclass takes six times as long.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    scored: tuple[ScoredToken, ...] = ()
    """The tokens of `content`, if log probabilities were requested."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Those of the prompt's tokens from the second one on, with the first token of an answer that asks for them."""

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to send."""
        return not (
            self.content
            or self.reasoning
            or self.tool_calls
            or self.scored
            or self.prompt_logprobs is not None
        )

    @classmethod
    def joined_in_order(cls, parts: Iterable[Self]) -> list[Self]:
        """Join the deltas of one choice as far as a delta keeps their order: reasoning, content, calls."""
        groups: list[list[Self]] = []
        last = 0
        for delta in parts:
            first = 0 if delta.reasoning else 1 if delta.content else 2
            if not groups or (first < last and not delta.is_empty):
                groups.append([])
                last = 0
            groups[-1].append(delta)
            last = max(last, 2 if delta.tool_calls else 1 if delta.content else 0)
        return [cls.joined(group) for group in groups]

    @classmethod
    def joined(cls, parts: Iterable[Self]) -> Self:
        """Join the deltas of one choice."""
        deltas = list(parts)
        if len(deltas) == 1:  # nearly always, and every token passes here
            return deltas[0]
        return cls(
            content="".join(delta.content for delta in deltas),
            reasoning="".join(delta.reasoning for delta in deltas),
            tool_calls=tuple(call for delta in deltas for call in delta.tool_calls),
            scored=tuple(token for delta in deltas for token in delta.scored),
            prompt_logprobs=next(
                (one.prompt_logprobs for one in deltas if one.prompt_logprobs is not None), None
            ),
        )


# OpenAI's `finish_reason`; the worker uses the first two only.
Finish: TypeAlias = Literal["stop", "length", "tool_calls"]


@dataclass(slots=True)
class _TokenTrace:
    """Maps characters of the answer back to the tokens that spell them."""

    _unspelled: list[ScoredToken] = field(default_factory=list)
    """Tokens whose text comes with a later token."""
    _groups: deque[tuple[int, int, list[ScoredToken]]] = field(default_factory=deque)
    """(start, end, tokens) of each piece of text, in characters."""
    _spelled_length: int = 0
    _decided_length: int = 0

    def add_token(self, token: ScoredToken) -> None:
        """Add a token; its text may come with a later one."""
        self._unspelled.append(token)

    def add_text(self, text: str) -> None:
        """Add the text of all tokens since the last text."""
        if not text:
            return
        end = self._spelled_length + len(text)
        if self._unspelled:
            self._groups.append((self._spelled_length, end, self._unspelled))
            self._unspelled = []
        self._spelled_length = end

    @property
    def undecided(self) -> int:
        """The number of tokens of whose text no character is decided."""
        undecided = len(self._unspelled)
        for start, _, tokens in self._groups:
            if start >= self._decided_length:
                undecided += len(tokens)
        return undecided

    def decide(self, span: Span) -> list[ScoredToken]:
        """Consume the characters of a span; return the tokens whose first shown character is among them."""
        start, end = self._decided_length, self._decided_length + len(span.text)
        self._decided_length = end
        if not self._groups:
            return []
        shown: list[ScoredToken] = []
        while self._groups and self._groups[0][1] <= start:
            self._groups.popleft()
        while span.role is SpanRole.CONTENT and self._groups and self._groups[0][0] < end:
            shown += self._groups.popleft()[2]
        return shown


@dataclass(slots=True, kw_only=True)
class OutputParser:
    """Turns the tokens of one job into deltas. Deterministic: the same tokens always give the same deltas."""

    detokenizer: Detokenizer
    stops: StopMatcher
    """Applied to content only, not to reasoning or calls."""
    answer: AnswerParser = field(default_factory=text_parser)
    """Reads reasoning, text and calls."""
    must_call: bool = False
    """True if the answer can only be calls: other text is then a cut call and hidden."""
    is_parallel: bool = True
    """True if the answer may continue after its first call."""
    is_prompt_only: bool = False
    """True if the answer has no tokens: the first one only brings the log probabilities of the prompt."""
    call_seed: str = ""
    """The ids of calls are derived from this text."""
    finish: Finish | None = None
    tokens: list[int] = field(default_factory=list)
    reasoning_tokens: int = 0
    """The number of tokens within reasoning, its end marker included."""
    _started_calls: int = 0
    _completed_calls: int = 0
    _shown_calls: int = 0
    _trace: _TokenTrace = field(default_factory=_TokenTrace)

    @property
    def is_over(self) -> bool:
        """Return whether the answer is complete."""
        return self.finish is not None

    @property
    def open_tokens(self) -> int:
        """The number of last tokens whose log probabilities may still be shown or dropped."""
        return self._trace.undecided

    def prime(self, tokens: Iterable[int]) -> None:
        """Feed the detokenizer with tokens of the prompt, so that the first blank of a completion is kept."""
        for token in tokens:
            self.detokenizer.add_token(token)
        _ = self.detokenizer.last_segment

    def take(self, output: TokenOutput) -> Delta:
        """Add one token; return its delta. `finish` may be set before the worker ends the job."""
        if self.is_prompt_only:
            self.finish = "length"
            return Delta(prompt_logprobs=output.prompt_logprobs)
        was_thinking = self.answer.is_thinking
        self.tokens.append(output.token)
        if output.finish != "stop":  # an end token has no text
            self.detokenizer.add_token(output.token)
            if output.logprobs is not None:
                self._trace.add_token(ScoredToken(token=output.token, logprobs=output.logprobs))
        if output.finish is not None:
            self.detokenizer.finalize()
        text = self.detokenizer.last_segment
        self._trace.add_text(text)
        delta = self._delta(self._spans(text, output.finish))
        self.reasoning_tokens += was_thinking or self.answer.is_thinking
        self.finish = self._finish(output)
        if output.prompt_logprobs is not None:
            delta = msgspec.structs.replace(delta, prompt_logprobs=output.prompt_logprobs)
        return delta

    @property
    def _is_cut(self) -> bool:
        """Return whether all further text is hidden."""
        return self.stops.is_stopped or (self._completed_calls > 0 and not self.is_parallel)

    def _finish(self, output: TokenOutput) -> Finish | None:
        if self._is_cut or output.finish == "stop":
            return "tool_calls" if self._started_calls else "stop"
        return output.finish

    def _spans(self, text: str, finish: FinishReason | None) -> list[Span]:
        spans: list[Span] = []
        for span in self.answer.feed(text):
            spans += self._match_stops(span)
        if finish is not None:
            for span in self.answer.flush(is_cut=finish == "length"):
                spans += self._match_stops(span)
            spans.append(Span(SpanRole.CONTENT, self.stops.flush()))
        return spans

    def _match_stops(self, span: Span) -> Sequence[Span]:
        is_content = span.role is SpanRole.CONTENT
        if self._is_cut or (self.must_call and is_content):
            return (Span(SpanRole.HIDDEN, span.text),)
        if is_content and not span.calls:
            return self.stops.spans(span)
        # A stop word does not span a call.
        return (Span(SpanRole.CONTENT, self.stops.flush()), self._count_calls(span))

    def _count_calls(self, span: Span) -> Span:
        calls: list[CallPiece] = []
        for piece in span.calls:
            if not self._is_cut:
                calls.append(piece)
            self._started_calls += piece.name is not None
            self._completed_calls += piece.is_complete
        return Span(span.role, span.text, tuple(calls))

    def _delta(self, spans: Iterable[Span]) -> Delta:
        """Return what these spans add to the answer."""
        content, reasoning = "", ""
        calls: list[CallPiece] = []
        scored: list[ScoredToken] = []
        for span in spans:
            role, text, pieces = span
            if text and (tokens := self._trace.decide(span)):
                scored += tokens
            if role is SpanRole.CONTENT:
                content += text
            elif role is SpanRole.REASONING:
                reasoning += text
            else:
                calls += [call for call in pieces if call.name is not None or call.arguments]
        return Delta(
            content=content,
            reasoning=reasoning,
            tool_calls=tuple(map(self._call, calls)) if calls else (),
            scored=tuple(scored),
        )

    def _call(self, call: CallPiece) -> ToolCallDelta:
        if call.name is None:
            return ToolCallDelta(index=self._shown_calls - 1, arguments=call.arguments)
        index, self._shown_calls = self._shown_calls, self._shown_calls + 1
        # Derived, so that an engine which continues the answer gives its calls the same ids.
        digest = hashlib.blake2b(f"{self.call_seed}/{index}".encode(), digest_size=12).hexdigest()
        return ToolCallDelta(
            index=index, id=f"call_{digest}", name=call.name, arguments=call.arguments
        )
