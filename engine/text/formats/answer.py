"""Format of a model's answers, as one family writes them. Pure."""

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from engine.grammar.calls import Syntax
from engine.text.formats.reader import AnswerParser, Reader, Steps, read_text
from engine.text.formats.tools import ToolSet
from engine.text.reasoning import ThinkingMarkers, ThinkingState, read_reasoning


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerContext:
    """Prompt and tools on which the parser of one answer depends."""

    thinking: ThinkingMarkers | None
    state: ThinkingState
    """State in which the prompt ends."""
    tools: ToolSet | None
    """None if the answer may have no calls."""


class FamilySign(NamedTuple):
    """Marks of a family, all of which a model has."""

    texts: tuple[str, ...] = ()
    """Texts of the chat template."""
    tokens: tuple[str, ...] = ()
    """Tokens of the vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """Format in which a family of models writes text and tool calls; it can be pickled with the traits of a template."""

    name: str
    models: str
    """Well-known models, for the documentation."""
    start: str
    """The text that opens a call."""
    signs: tuple[FamilySign, ...]
    """Each of them alone shows the family."""
    content: Callable[[Reader, ToolSet], Steps[None]] = field(compare=False)
    """Parser of what follows the reasoning."""
    answer: Callable[[Reader, AnswerContext], Steps[None]] | None = None
    """Parser of the whole answer, if reasoning is not only between markers at its beginning."""
    text: Callable[[Reader], Steps[None]] = field(default=read_text, compare=False)
    """Parser of what follows the reasoning, if the answer may have no calls."""
    thinking: ThinkingMarkers | None = None
    """Markers around reasoning, if they are no tokens of their own."""
    syntax: Syntax | None = None
    """Syntax that a grammar enforces; None if calls can only be parsed."""
    is_native: bool = True
    """True if the chat template renders tools, calls and results; otherwise the prompt describes them."""
    is_single: bool = False
    """True if an answer has one call at most."""

    def matches(self, template: str, vocabulary: Container[str]) -> bool:
        """Return whether a model with this chat template and vocabulary is of the family."""
        return any(
            all(text in template for text in sign.texts)
            and all(token in vocabulary for token in sign.tokens)
            for sign in self.signs
        )

    def new_parser(self, context: AnswerContext) -> AnswerParser:
        """Return a parser of one answer."""
        return AnswerParser(partial(self._parse, context=context))

    def _parse(self, reader: Reader, context: AnswerContext) -> Steps[None]:
        if self.answer is not None:
            yield from self.answer(reader, context)
            return
        yield from read_reasoning(reader, context.thinking, context.state)
        if context.tools is not None:
            yield from self.content(reader, context.tools)
            return
        yield from self.text(reader)
