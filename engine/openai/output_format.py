"""What an answer may be, for one model: the words and variables its prompt needs, and the grammar it has to match.

Joins what a request wants (formats, tools, effort) with how the model speaks (`text/voice.py`). Runs in the threads
that tokenize: compiling a grammar takes up to a second.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from engine import errors
from engine.errors import GrammarError, PromptRefusedError, RefusedError
from engine.grammar import json_schema, lark
from engine.grammar.interface import GrammarCompiler
from engine.grammar.lark import CallRules, CallSyntax, ReasoningMarkers
from engine.jobs import SamplingParams
from engine.openai.output_options import CallableTool, RequiredSchema, Toolbox
from engine.openai.request_body import GenerationRequest
from engine.ports import Codec, Message
from engine.text import reasoning, template_traits
from engine.text.output_parser import OutputParser
from engine.text.reasoning import ReasoningParser, ThinkingState
from engine.text.spans import StopMatcher
from engine.text.template_traits import TemplateTraits
from engine.text.tool_calls import PLAIN, ToolCallFormat, ToolCallParser, tool_instructions

Json: TypeAlias = Any

# A marker and the blanks behind it are few tokens.
_TAIL_TOKENS = 16
# OpenAI's lowest bias, which amounts to a ban.
_BAN_BIAS = -100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormat:
    """How the answers to one prompt are made and read."""

    grammar: str | None
    _bias: tuple[tuple[int, float], ...]
    _request: GenerationRequest
    _codec: Codec
    _opening: ThinkingState
    _dialect: ToolCallFormat | None

    def biased(self, sampling: SamplingParams) -> SamplingParams:
        """Return a sampling with the bias that comes with the manner; a client's own for a token stays."""
        own = {token for token, _ in sampling.logit_bias}
        added = tuple(one for one in self._bias if one[0] not in own)
        return replace(sampling, logit_bias=sampling.logit_bias + added)

    def reading(self, call_seed: str) -> OutputParser:
        """Return what reads one answer; the ids of its calls are derived from `call_seed`."""
        box = self._request.toolbox
        offers = () if box is None else box.offers
        named = [offer.function.name for offer in offers]
        shown = () if box is None else box.shown
        tools = tuple(tool for tool in shown if tool["function"]["name"] in named)
        thinking = self._codec.traits.thinking if self._request.is_chat else None
        return OutputParser(
            detokenizer=self._codec.detokenizer(),
            stops=StopMatcher(self._request.stops),
            thoughts=ReasoningParser(thinking, self._opening),
            calls=ToolCallParser(
                dialect=self._dialect, tools=tools, must_call=box is not None and box.must_call
            ),
            is_parallel=box is None or box.is_parallel,
            call_seed=call_seed,
        )


def schema_length(request: GenerationRequest) -> int:
    """Return about how many characters of schemas a request has: they are compiled, and written into the prompt."""
    box, wanted = request.toolbox, request.format
    shown = 0 if box is None else sum(len(str(tool)) for tool in box.shown)
    return shown + (0 if wanted is None else len(str(wanted.schema)))


@dataclass(frozen=True, slots=True)
class ChatEncoder:
    """A codec that writes one request's conversation: with its tools, its format and its effort."""

    request: GenerationRequest
    codec: Codec

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be turned into a prompt."""
        return self.codec.has_chat_template

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return a conversation's tokens.

        Raises:
            PromptRefusedError: the template does not allow these messages.
            RefusedError: the model cannot be told how much to think.

        """
        try:
            return self._encoded(messages)
        except RecursionError as error:
            raise PromptRefusedError("something in them is nested too deeply") from error

    def _encoded(self, messages: Sequence[Message]) -> list[int]:
        traits, given = self.codec.traits, template_variables(self.request, self.codec.traits)
        speaks = tool_call_format(self.request, traits) or traits.dialect
        shown = list(messages) if speaks.is_native else template_traits.spell_tool_calls(messages)
        words = self._words(speaks)
        if not words:
            return self.codec.encode_chat(shown, **given)
        try:
            return self.codec.encode_chat(template_traits.add_system_text(shown, words), **given)
        except PromptRefusedError:
            # Most templates that refuse something here know no system.
            return self.codec.encode_chat(template_traits.add_user_text(shown, words), **given)

    def _words(self, speaks: ToolCallFormat) -> str:
        box, wanted = self.request.toolbox, self.request.format
        parts: list[str] = []
        if box is not None and box.offers and not speaks.is_native:
            parts.append(tool_instructions(box.shown))
        if wanted is not None and wanted.instruction:
            parts.append(wanted.instruction)
        return "\n\n".join(parts)


def tool_call_format(request: GenerationRequest, traits: TemplateTraits) -> ToolCallFormat | None:
    """Return how calls are written; None if none may be."""
    box = request.toolbox
    if box is None or not box.offers:
        return None
    must_enforce = box.must_call or request.format is not None
    if must_enforce and traits.dialect.form is None:
        return PLAIN
    return traits.dialect


def template_variables(request: GenerationRequest, traits: TemplateTraits) -> dict[str, Json]:
    """Return what the chat template is given besides messages.

    Raises:
        RefusedError: the model cannot be told how much to think.

    """
    given: dict[str, Json] = {}
    speaks = tool_call_format(request, traits)
    if request.toolbox is not None and speaks is not None and speaks.is_native:
        given["tools"] = list(request.toolbox.shown)
    return given | _effort_variables(request.effort, traits)


def _effort_variables(effort: str | None, traits: TemplateTraits) -> dict[str, Json]:
    if effort is None:
        return {}
    given: dict[str, Json] = {}
    for switch in ("enable_thinking", "thinking"):
        if traits.thinking is not None and traits.mentions(switch):
            # Models with a switch think or do not; how much is theirs.
            given[switch] = effort not in ("none", "minimal")
            break
    if traits.mentions("reasoning_effort"):
        given["reasoning_effort"] = effort
    # A model that does not think does without a thought what "none" asks for.
    if not given and (effort != "none" or traits.thinking is not None):
        message = (
            "This model's chat template has no place for an effort; leave 'reasoning_effort' out."
        )
        raise errors.invalid(message, param="reasoning_effort", code="unsupported_parameter")
    return given


def build(
    request: GenerationRequest,
    prompt: Sequence[int],
    codec: Codec,
    grammars: GrammarCompiler | None,
) -> OutputFormat:
    """Return how the answers to a prompt are made and read.

    Raises:
        RefusedError: the schemas cannot be enforced, or nothing can be on this model.

    """
    traits = codec.traits
    opening = ThinkingState.FREE
    if traits.thinking is not None:
        tail = b"".join(codec.piece(token) for token in prompt[-_TAIL_TOKENS:])
        opening = reasoning.thinking_state(tail.decode(errors="ignore"), traits.thinking)
    thought = None
    if traits.thinking is not None and opening is not ThinkingState.CLOSED:
        is_open = opening is ThinkingState.OPEN
        thought = ReasoningMarkers(
            start=traits.thinking.start, end=traits.thinking.end, is_open=is_open
        )
    return OutputFormat(
        grammar=_grammar(request, traits, thought, grammars),
        _bias=_tool_call_ban(request.toolbox, traits),
        _request=request,
        _codec=codec,
        _opening=opening,
        _dialect=tool_call_format(request, traits),
    )


def _tool_call_ban(box: Toolbox | None, traits: TemplateTraits) -> tuple[tuple[int, float], ...]:
    """Keep a model that was told to call nothing from opening a call."""
    marker = traits.specials.get(traits.dialect.start)
    is_banned = box is not None and not box.offers and marker is not None
    return ((marker, _BAN_BIAS),) if is_banned and marker is not None else ()


def _grammar(
    request: GenerationRequest,
    traits: TemplateTraits,
    thought: ReasoningMarkers | None,
    grammars: GrammarCompiler | None,
) -> str | None:
    speaks = tool_call_format(request, traits)
    form = None if speaks is None else speaks.form
    if request.format is None and form is None:
        return None
    box = request.toolbox
    if grammars is None:
        if request.format is None and box is not None and not box.must_call:
            return None  # read, as the calls of dialects are that have no form
        param = "tool_choice" if request.format is None else request.format.param
        raise errors.invalid("The outputs of this model cannot be constrained.", param=param)
    builder = _GrammarBuilder(request, traits, thought, grammars)
    if form is not None and box is not None:
        return builder.calls(box, form)
    assert request.format is not None
    return builder.answer(request.format)


@dataclass(frozen=True, slots=True)
class _GrammarBuilder:
    request: GenerationRequest
    traits: TemplateTraits
    thought: ReasoningMarkers | None
    grammars: GrammarCompiler

    def answer(self, wanted: RequiredSchema) -> str:
        text = lark.json_grammar(wanted.schema, self.traits.specials, self.thought)
        error = self._error(text)
        if error is not None:
            raise self._refused(wanted.schema, wanted.param, error)
        return text

    def calls(self, box: Toolbox, form: CallSyntax) -> str:
        text = self._calls(box, box.offers, form)
        if self._error(text) is None:
            return text
        if self.request.format is not None:
            self.answer(self.request.format)  # says so, if that is what cannot be enforced
        text = self._calls(box, [self._enforced(offer) for offer in box.offers], form)
        error = self._error(text)
        if error is not None:
            raise errors.invalid(f"Together these tools are too much: {error}", param="tools")
        return text

    def _calls(self, box: Toolbox, offers: Sequence[CallableTool], form: CallSyntax) -> str:
        calling = CallRules(
            form=form,
            functions=tuple(offer.function for offer in offers),
            instead=None if self.request.format is None else self.request.format.schema,
            must_call=box.must_call,
            is_parallel=box.is_parallel,
        )
        return lark.call_grammar(calling, self.traits.specials, self.thought)

    def _enforced(self, offer: CallableTool) -> CallableTool:
        """Return an offer whose arguments can be enforced: as any object, if they need not be more."""
        parameters = offer.function.parameters
        error = self._error(lark.json_grammar(parameters, {}, None))
        if error is None:
            return offer
        if offer.is_strict:
            raise self._refused(parameters, offer.param, error)
        return replace(offer, function=replace(offer.function, parameters={"type": "object"}))

    def _refused(self, wanted: Json, param: str, error: str) -> RefusedError:
        where = json_schema.find_failing_part(
            wanted, lambda part: bool(self._error(lark.json_grammar(part, {}, None)))
        )
        return errors.invalid(f"Invalid schema: {where}: {error}", param=param)

    def _error(self, text: str) -> str | None:
        try:
            self.grammars.check(text)
        except GrammarError as error:
            return str(error) or "it cannot be compiled"
        return None
