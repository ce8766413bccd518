"""Output format of one request on one model: prompt text, template variables, grammar and parsers.

Combines what a request demands (tools, response format, reasoning effort) with the traits of the model's chat
template. `ChatEncoder` and `write_grammar` run in the input workers, the rest in the serving process.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from engine.errors import GrammarError, PromptRefusedError
from engine.grammar import calls, json_schema, lark
from engine.grammar.calls import CallRules, CallSyntax, HarmonySyntax, Syntax
from engine.grammar.interface import CompiledGrammar, GrammarCompiler
from engine.grammar.lark import ReasoningMarkers
from engine.jobs import SamplingParams
from engine.openai.output_options import CallableTool, RequiredText, Toolbox
from engine.openai.request_body import (
    Conversation,
    ConversationEnd,
    GenerationRequest,
    TextPrompts,
)
from engine.text import reasoning, template_traits
from engine.text.codec import TextCodec
from engine.text.formats.answer import AnswerContext, AnswerFormat
from engine.text.formats.registry import PLAIN
from engine.text.formats.tools import ToolSet
from engine.text.interface import Message
from engine.text.output_parser import OutputParser
from engine.text.reasoning import ThinkingState
from engine.text.spans import StopMatcher
from engine.text.template_traits import TemplateTraits
from schemas.wire import errors
from schemas.wire.errors import RefusedError

Json: TypeAlias = Any

# Enough for a marker and the blanks after it.
_TAIL_TOKENS = 16
# OpenAI's lowest bias, which amounts to a ban.
_BAN_BIAS = -100.0
# Parameters of transformers' apply_chat_template; the defaults are in the codec.
_END_VARIABLES: Mapping[ConversationEnd, Mapping[str, Json]] = {
    ConversationEnd.ANSWER_BEGUN: {},
    ConversationEnd.MESSAGE_ENDED: {"add_generation_prompt": False},
    ConversationEnd.MESSAGE_OPEN: {"add_generation_prompt": False, "continue_final_message": True},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormat:
    """The grammar, the bias and the parsers for the answers to one prompt."""

    grammar: str | None
    grammar_param: str
    """The path of the schema in the request; empty without a grammar."""
    compiled: CompiledGrammar | None
    """Holds the grammar in memory, so that the worker need not compile it again."""
    _bias: tuple[tuple[int, float], ...]
    _request: GenerationRequest
    _codec: TextCodec
    _thinking_state: ThinkingState
    _call_format: AnswerFormat | None

    def with_bias(self, sampling: SamplingParams) -> SamplingParams:
        """Return `sampling` with the bias of this format; the client's own bias for a token wins."""
        own = {token for token, _ in sampling.logit_bias}
        added = tuple(bias for bias in self._bias if bias[0] not in own)
        return replace(sampling, logit_bias=sampling.logit_bias + added)

    def new_parser(self, call_seed: str) -> OutputParser:
        """Return a parser for one answer; the ids of its tool calls are derived from `call_seed`."""
        toolbox = self._request.toolbox
        callable_tools = () if toolbox is None else toolbox.callable_tools
        names = [tool.function.name for tool in callable_tools]
        all_tools = () if toolbox is None else toolbox.template_tools
        tools = tuple(tool for tool in all_tools if tool["function"]["name"] in names)
        traits, is_chat = self._codec.traits, self._request.is_chat
        answer_format = self._call_format or traits.answer_format
        context = AnswerContext(
            thinking=traits.thinking if is_chat else None,
            state=self._thinking_state,
            tools=None if self._call_format is None else ToolSet(tools),
        )
        return OutputParser(
            detokenizer=self._codec.detokenizer(),
            stops=StopMatcher(self._request.stops, ends=self._infill_ends()),
            answer=(answer_format if is_chat else PLAIN).new_parser(context),
            must_call=toolbox is not None and toolbox.must_call,
            is_parallel=(toolbox is None or toolbox.is_parallel) and not answer_format.is_single,
            is_prompt_only=self._request.is_prompt_only,
            call_seed=call_seed,
        )

    def _infill_ends(self) -> tuple[str, ...]:
        prompt, infill = self._request.prompt, self._codec.traits.infill
        is_infill = isinstance(prompt, TextPrompts) and prompt.infill is not None
        return infill.ends if is_infill and infill is not None else ()


def schema_length(request: GenerationRequest) -> int:
    """Return the approximate number of characters of a request's schemas and grammars, which are compiled and prompted."""
    toolbox = request.toolbox
    tools_length = 0 if toolbox is None else sum(len(str(tool)) for tool in toolbox.template_tools)
    return tools_length + (0 if request.format is None else request.format.length)


@dataclass(frozen=True, slots=True)
class ChatEncoder:
    """Encodes the conversation of one request, with its tools, its response format and its effort."""

    request: GenerationRequest
    codec: TextCodec
    max_tokens: int | None = None
    """A conversation that is certainly longer is not tokenized; None tokenizes any."""
    rewrite: Callable[[str], str] | None = None
    """Changes the rendered conversation before it is tokenized."""

    @property
    def has_chat_template(self) -> bool:
        """Return whether the model has a chat template."""
        return self.codec.has_chat_template

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation.

        Raises:
            PromptRefusedError: the template does not support these messages.
            RefusedError: the template has no place for a reasoning effort.
            TextTooLongError: the conversation has more than `max_tokens`.

        """
        try:
            return self._encode(messages)
        except RecursionError as error:
            raise PromptRefusedError("the messages are nested too deeply") from error

    def _encode(self, messages: Sequence[Message]) -> list[int]:
        traits = self.codec.traits
        variables = template_variables(self.request, traits)
        call_format = call_format_of(self.request, traits) or traits.answer_format
        if not call_format.is_native:
            messages = template_traits.spell_tool_calls(messages)
        text = self._instructions(call_format)
        if not text:
            return self._tokenize_history(messages, variables)
        try:
            return self._tokenize(template_traits.add_system_text(messages, text), variables)
        except PromptRefusedError:
            # Most templates that fail here have no system role.
            return self._tokenize(template_traits.add_user_text(messages, text), variables)

    def _tokenize_history(
        self, messages: Sequence[Message], variables: Mapping[str, Json]
    ) -> list[int]:
        """Encode the messages in the first form of calls that the template supports.

        DeepSeek's takes arguments as text, Llama's one call in a message, and Mistral's ids of nine characters.
        """
        try:
            return self._tokenize(messages, variables)
        except PromptRefusedError:
            if not any(message.get("tool_calls") for message in messages):
                raise
        try:
            return self._tokenize(template_traits.quote_arguments(messages), variables)
        except PromptRefusedError:
            return self._tokenize(template_traits.spell_tool_calls(messages), variables)

    def _tokenize(self, messages: Sequence[Message], variables: Mapping[str, Json]) -> list[int]:
        return self.codec.encode_chat(
            list(messages), max_tokens=self.max_tokens, rewrite=self.rewrite, **variables
        )

    def _instructions(self, call_format: AnswerFormat) -> str:
        toolbox, form = self.request.toolbox, self.request.format
        parts: list[str] = []
        if toolbox is not None and toolbox.callable_tools and not call_format.is_native:
            parts.append(template_traits.tool_instructions(toolbox.template_tools))
        if form is not None and form.instruction:
            parts.append(form.instruction)
        return "\n\n".join(parts)


def call_format_of(request: GenerationRequest, traits: TemplateTraits) -> AnswerFormat | None:
    """Return the format of tool calls in the answer; None if it may have none."""
    toolbox = request.toolbox
    if toolbox is None or not toolbox.callable_tools:
        return None
    must_enforce = toolbox.must_call or request.format is not None
    if must_enforce and traits.answer_format.syntax is None:
        return PLAIN
    return traits.answer_format


def template_variables(request: GenerationRequest, traits: TemplateTraits) -> dict[str, Json]:
    """Return the variables of the chat template besides the messages.

    Raises:
        RefusedError: the template has no place for a reasoning effort, and the deployment refuses what has no effect.

    """
    variables: dict[str, Json] = {}
    call_format = call_format_of(request, traits)
    if request.toolbox is not None and call_format is not None and call_format.is_native:
        variables["tools"] = list(request.toolbox.template_tools)
    variables |= _END_VARIABLES[_conversation_end(request)]
    # A variable that the template does not read changes nothing.
    own = {
        name: value for name, value in request.template_variables.items() if traits.mentions(name)
    }
    if request.refuses_unknown and "reasoning_effort" in ignored_by_template(request, traits):
        raise errors.invalid(
            "This model's chat template has no place for an effort; leave 'reasoning_effort' out.",
            param="reasoning_effort",
            code="unsupported_parameter",
        )
    return variables | _effort_variables(request.effort, traits) | own


def ignored_by_template(request: GenerationRequest, traits: TemplateTraits) -> tuple[str, ...]:
    """Return the names of parameters for which the model's chat template has no place."""
    ignored: list[str] = []
    # A model without reasoning complies with "none" as it is.
    is_met = request.effort is None or (request.effort == "none" and traits.thinking is None)
    if not is_met and not _effort_variables(request.effort, traits):
        ignored.append("reasoning_effort")
    if request.template_variables and not any(map(traits.mentions, request.template_variables)):
        ignored.append("chat_template_kwargs")
    return tuple(ignored)


def _conversation_end(request: GenerationRequest) -> ConversationEnd:
    prompt = request.prompt
    return prompt.end if isinstance(prompt, Conversation) else ConversationEnd.ANSWER_BEGUN


def _effort_variables(effort: str | None, traits: TemplateTraits) -> dict[str, Json]:
    if effort is None:
        return {}
    variables: dict[str, Json] = {}
    for switch in ("enable_thinking", "thinking"):
        if traits.thinking is not None and traits.mentions(switch):
            # A switch turns reasoning on or off; the model decides how much.
            variables[switch] = effort not in ("none", "minimal")
            break
    if traits.mentions("reasoning_effort"):
        variables["reasoning_effort"] = effort
    return variables


def build(
    request: GenerationRequest,
    prompt: Sequence[int],
    codec: TextCodec,
    grammar: str | None,
    compiled: CompiledGrammar | None,
) -> OutputFormat:
    """Return the output format of the answers to one prompt; `grammar` is that of `write_grammar`."""
    traits = codec.traits
    return OutputFormat(
        grammar=grammar,
        grammar_param=_grammar_param(request),
        compiled=compiled,
        _bias=_tool_call_ban(request.toolbox, traits),
        _request=request,
        _codec=codec,
        _thinking_state=thinking_state(request, prompt, codec),
        _call_format=call_format_of(request, traits),
    )


def has_grammar(request: GenerationRequest, traits: TemplateTraits) -> bool:
    """Return whether the answers to a request have a grammar, if the model's outputs can be constrained."""
    return request.format is not None or _enforced_syntax(request, traits) is not None


def _enforced_syntax(request: GenerationRequest, traits: TemplateTraits) -> Syntax | None:
    """Return the syntax of calls that the grammar enforces.

    Arguments between tags, and channels, are enforced on demand only: a grammar would forbid variants that models write.
    """
    toolbox, call_format = request.toolbox, call_format_of(request, traits)
    if toolbox is None or call_format is None or call_format.syntax is None:
        return None
    is_demanded = toolbox.must_call or request.format is not None
    is_json = isinstance(call_format.syntax, CallSyntax) and call_format.syntax.tags is None
    is_strict = any(tool.is_strict for tool in toolbox.callable_tools)
    return call_format.syntax if is_demanded or is_json or is_strict else None


def unenforced_format(request: GenerationRequest, traits: TemplateTraits) -> str | None:
    """Return the name of the format of calls if no grammar is known for it, so that calls are only parsed."""
    call_format = call_format_of(request, traits)
    return call_format.name if call_format is not None and call_format.syntax is None else None


def prompt_tail(prompt: Sequence[int]) -> tuple[int, ...]:
    """Return the last tokens of a prompt, on which its grammar depends."""
    return tuple(prompt[-_TAIL_TOKENS:])


def write_grammar(
    request: GenerationRequest,
    prompt: Sequence[int],
    codec: TextCodec,
    grammars: GrammarCompiler | None,
) -> str | None:
    """Return the grammar of the answers to a prompt, which compiles; None if they have none.

    Raises:
        RefusedError: a schema cannot be enforced, or this model's output cannot be constrained at all.

    """
    traits = codec.traits
    state = thinking_state(request, prompt, codec)
    markers = None
    has_markers = not isinstance(traits.answer_format.syntax, HarmonySyntax)
    if request.is_chat and has_markers and traits.thinking is not None and state.may_think:
        markers = ReasoningMarkers(
            start=traits.thinking.start, end=traits.thinking.end, is_open=state.is_open
        )
    return _grammar(request, traits, markers, grammars)


def thinking_state(
    request: GenerationRequest, prompt: Sequence[int], codec: TextCodec
) -> ThinkingState:
    """Return whether the answer to a prompt begins inside of the reasoning."""
    thinking, asked = codec.traits.thinking, request.prompt
    if isinstance(asked, Conversation) and asked.end is ConversationEnd.MESSAGE_OPEN:
        return reasoning.continued_state(asked.messages[-1]["content"], thinking)
    if thinking is None:
        return ThinkingState.FREE
    tail = b"".join(codec.piece(token) for token in prompt_tail(prompt))
    return reasoning.thinking_state(tail.decode(errors="ignore"), thinking)


def _grammar_param(request: GenerationRequest) -> str:
    if request.format is not None:
        return request.format.param
    return "tools" if request.toolbox is not None else ""


def _tool_call_ban(
    toolbox: Toolbox | None, traits: TemplateTraits
) -> tuple[tuple[int, float], ...]:
    """Return a bias that keeps a model from starting a call when `tool_choice` is "none"."""
    marker = traits.specials.get(traits.answer_format.start)
    if toolbox is None or toolbox.callable_tools or marker is None:
        return ()
    return ((marker, _BAN_BIAS),)


def _grammar(
    request: GenerationRequest,
    traits: TemplateTraits,
    markers: ReasoningMarkers | None,
    grammars: GrammarCompiler | None,
) -> str | None:
    syntax = _enforced_syntax(request, traits)
    if request.format is None and syntax is None:
        return None
    toolbox = request.toolbox
    if grammars is None:
        if request.format is None and toolbox is not None and not toolbox.must_call:
            return None  # calls are parsed but not enforced
        param = "tool_choice" if request.format is None else request.format.param
        raise errors.invalid("The outputs of this model cannot be constrained.", param=param)
    builder = _GrammarBuilder(request, traits, markers, grammars)
    if syntax is not None and toolbox is not None:
        return builder.call_grammar(toolbox, syntax)
    assert request.format is not None
    return builder.answer_grammar(request.format)


@dataclass(frozen=True, slots=True)
class _GrammarBuilder:
    request: GenerationRequest
    traits: TemplateTraits
    markers: ReasoningMarkers | None
    grammars: GrammarCompiler

    def answer_grammar(self, required: RequiredText) -> str:
        traits = self.traits
        if self.request.is_chat and isinstance(traits.answer_format.syntax, HarmonySyntax):
            grammar = calls.harmony_answer(required.value, traits.specials)
        else:
            grammar = lark.answer_grammar(required.value, traits.specials, self.markers)
        error = self._error(grammar)
        if error is None:
            return grammar
        if required.schema is not None:
            raise self._schema_error(required.schema, required.param, error)
        raise errors.invalid(f"Invalid '{required.param}': {error}", param=required.param)

    def call_grammar(self, toolbox: Toolbox, syntax: Syntax) -> str:
        grammar = self._write(toolbox, toolbox.callable_tools, syntax)
        if self._error(grammar) is None:
            return grammar
        if self.request.format is not None:
            self.answer_grammar(self.request.format)  # raises if the response format is the cause
        tools = [self._enforceable(tool) for tool in toolbox.callable_tools]
        grammar = self._write(toolbox, tools, syntax)
        error = self._error(grammar)
        if error is not None:
            raise errors.invalid(
                f"The schemas of these tools are too large together: {error}", param="tools"
            )
        return grammar

    def _write(self, toolbox: Toolbox, tools: Sequence[CallableTool], syntax: Syntax) -> str:
        rules = CallRules(
            syntax=syntax,
            functions=tuple(tool.function for tool in tools),
            instead=None if self.request.format is None else self.request.format.value,
            must_call=toolbox.must_call,
            is_parallel=toolbox.is_parallel,
        )
        return calls.call_grammar(rules, self.traits.specials, self.markers)

    def _enforceable(self, tool: CallableTool) -> CallableTool:
        """Return the tool with parameters that can be enforced: any object, if it is not strict."""
        parameters = tool.function.parameters
        error = self._error(lark.json_grammar(parameters, {}, None))
        if error is None:
            return tool
        if tool.is_strict:
            raise self._schema_error(parameters, tool.param, error)
        return replace(tool, function=replace(tool.function, parameters={"type": "object"}))

    def _schema_error(self, schema: Json, param: str, error: str) -> RefusedError:
        where = json_schema.find_failing_part(
            schema, lambda part: bool(self._error(lark.json_grammar(part, {}, None)))
        )
        return errors.invalid(f"Invalid schema: {where}: {error}", param=param)

    def _error(self, grammar: str) -> str | None:
        try:
            self.grammars.check(grammar)
        except GrammarError as error:
            return str(error) or "it cannot be compiled"
        return None
