"""`/v1/responses`, the part of it that keeps no state: a request is read as the chat request it stands for. Pure.

So whatever a chat honours or refuses is honoured or refused here, under the names of this endpoint. What is made
of the answer is in unfolding.py.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import orjson
from pydantic import BaseModel, ConfigDict, Field, Tag

from engine import errors
from engine.errors import Refusal, RefusedError
from engine.openai import input_items, request_body
from engine.openai.input_items import ChatTranscript, Item, ItemOrigin
from engine.openai.parameters import EndpointParameters, LimitedParameter
from engine.openai.request_body import GenerationRequest

Json: TypeAlias = dict[str, Any]

_STRICT = ConfigDict(strict=True, extra="forbid", serialize_by_alias=True)
_STATELESS = "This engine keeps no answers and no conversations; send the whole input."


class FunctionTool(BaseModel):
    """A function that the model may call."""

    model_config = _STRICT

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class NamedFunction(BaseModel):
    """The function that must be called."""

    model_config = _STRICT

    type: Literal["function"]
    name: str


class AllowedTools(BaseModel):
    """Which of the tools may be called."""

    model_config = _STRICT

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunction]


ToolChoice: TypeAlias = Annotated[
    Annotated[NamedFunction, Tag("a function")] | Annotated[AllowedTools, Tag("a allowed_tools")],
    input_items.type_discriminator(),
]


class PlainFormat(BaseModel):
    """Text."""

    model_config = _STRICT

    type: Literal["text"]


class ObjectFormat(BaseModel):
    """Any JSON object."""

    model_config = _STRICT

    type: Literal["json_object"]


class SchemaFormat(BaseModel):
    """JSON that a schema describes."""

    model_config = _STRICT

    type: Literal["json_schema"]
    name: str
    shape: Json = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


AnyFormat: TypeAlias = Annotated[
    Annotated[PlainFormat, Tag("a text")]
    | Annotated[ObjectFormat, Tag("a json_object")]
    | Annotated[SchemaFormat, Tag("a json_schema")],
    input_items.type_discriminator(),
]


class TextConfig(BaseModel):
    """How the text of an answer should be."""

    model_config = _STRICT

    format: AnyFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(BaseModel):
    """How much the model should think; of its thoughts there are no summaries."""

    model_config = _STRICT

    effort: str | None = None
    summary: None = None
    generate_summary: None = None


class StreamOptions(BaseModel):
    """Nothing of a stream is padded."""

    model_config = _STRICT

    include_obfuscation: Literal[False] | None = None


class ResponsesBody(BaseModel):
    """What `/v1/responses` takes."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str
    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    reasoning: ReasoningConfig | None = None
    safety_identifier: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    text: TextConfig | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    tools: list[FunctionTool] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    user: str | None = None
    session_id: request_body.SessionId | None = None


_LABELS = frozenset({"metadata", "prompt_cache_key", "safety_identifier", "session_id", "user"})
_LIMITED: Mapping[str, LimitedParameter] = {
    "background": LimitedParameter(values=(False,), why=_STATELESS),
    "context_management": LimitedParameter(values=([],), why="This engine shortens no context."),
    "conversation": LimitedParameter(why=_STATELESS),
    "include": LimitedParameter(
        values=([],), why="There is nothing that an answer would not include."
    ),
    "max_tool_calls": LimitedParameter(why="This engine calls no tools itself."),
    "moderation": LimitedParameter(why="This engine judges no content."),
    "previous_response_id": LimitedParameter(why=_STATELESS),
    "prompt": LimitedParameter(
        why="This engine keeps no prompts; send 'instructions' and 'input'."
    ),
    "prompt_cache_options": LimitedParameter(
        values=({}, {"mode": "implicit"}), why="Prefixes are always cached."
    ),
    "prompt_cache_retention": LimitedParameter(
        values=("in_memory",), why="Prefixes are kept in memory, for no promised time."
    ),
    "service_tier": LimitedParameter(values=("auto", "default"), why="There is one tier."),
    "store": LimitedParameter(values=(False,), why=_STATELESS),
    "top_logprobs": LimitedParameter(
        values=(0,), why="Likelihoods are told by /v1/chat/completions."
    ),
    "truncation": LimitedParameter(values=("disabled",), why="What is too long is refused."),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest:
    """What one client wants."""

    chat: GenerationRequest
    """The same, as the engine knows it."""
    origins: tuple[ItemOrigin, ...]
    """Which items each message of the chat came from."""
    echo: Json
    """What of the request the answer repeats."""

    @property
    def model(self) -> str:
        """The name it asks for."""
        return self.chat.model

    def told(self, refusal: Refusal) -> Refusal:
        """Return a chat's refusal under the names of this endpoint."""
        return _rename_params(refusal, self.origins)


def accepted_parameters() -> EndpointParameters:
    """Return the names of `/v1/responses`."""
    own = frozenset(ResponsesBody.model_fields) - _LABELS
    return EndpointParameters(honoured=own, labels=_LABELS, limited=_LIMITED)


def parse(raw: bytes) -> ResponsesRequest:
    """Read a body.

    Raises:
        RefusedError: it asks for something that is wrong or that the engine does not do.

    """
    fields = request_body.read_object(raw)
    accepted_parameters().check(fields)
    fields["input"] = input_items.normalize(fields.get("input"))
    _check_tools(fields)
    body = request_body.validate(ResponsesBody, fields)
    if body.stream_options is not None and not body.stream:
        raise errors.invalid(
            "'stream_options' is only allowed when 'stream' is true.", param="stream_options"
        )
    chat = input_items.to_chat(body.input, body.instructions)
    origins = tuple(chat.origins)
    try:
        request = request_body.parse_chat(orjson.dumps(_chat_body(body, chat)))
    except RefusedError as error:
        raise RefusedError(_rename_params(error.refusal, origins)) from error
    return ResponsesRequest(chat=request, origins=origins, echo=_echoed_fields(body))


def _check_tools(fields: Json) -> None:
    tools = fields.get("tools")
    if not isinstance(tools, list):
        return
    for at, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise errors.invalid(
                f"This engine runs no tools itself; '{kind[:50]}' is not supported, 'function' is.",
                param=f"tools[{at}].type",
            )
        if isinstance(tool, dict):
            tools[at] = {name: value for name, value in tool.items() if value is not None}


def _chat_body(body: ResponsesBody, chat: ChatTranscript) -> Json:
    text = body.text or TextConfig()
    given: Json = {
        "model": body.model,
        "messages": chat.messages,
        "max_completion_tokens": body.max_output_tokens,
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning_effort": body.reasoning and body.reasoning.effort,
        "response_format": _chat_response_format(text.format),
        "safety_identifier": body.safety_identifier,
        "stream": body.stream,
        "temperature": body.temperature,
        "tool_choice": _chat_tool_choice(body.tool_choice),
        "tools": [_chat_tool(tool) for tool in body.tools or ()],
        "top_p": body.top_p,
        "user": body.user,
        "verbosity": text.verbosity,
    }
    return {name: value for name, value in given.items() if value not in (None, [])}


def _chat_response_format(wanted: PlainFormat | ObjectFormat | SchemaFormat | None) -> Json | None:
    if not isinstance(wanted, SchemaFormat):
        return None if wanted is None else {"type": wanted.type}
    own = wanted.model_dump(exclude={"type"}, exclude_none=True)
    return {"type": "json_schema", "json_schema": own}


def _chat_tool(tool: FunctionTool | NamedFunction) -> Json:
    own = tool.model_dump(exclude={"type"}, exclude_none=True)
    return {"type": "function", "function": own}


def _chat_tool_choice(wanted: str | NamedFunction | AllowedTools | None) -> str | Json | None:
    if isinstance(wanted, NamedFunction):
        return _chat_tool(wanted)
    if isinstance(wanted, AllowedTools):
        tools = [_chat_tool(tool) for tool in wanted.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": wanted.mode, "tools": tools}}
    return wanted


def _echoed_fields(body: ResponsesBody) -> Json:
    text, reasoning = body.text or TextConfig(), body.reasoning or ReasoningConfig()
    format_ = {"type": "text"} if text.format is None else text.format.model_dump(exclude_none=True)
    choice = body.tool_choice
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": body.model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": format_, "verbosity": text.verbosity or "medium"},
        "tool_choice": choice.model_dump() if isinstance(choice, BaseModel) else choice or "auto",
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_logprobs": 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


# What a chat calls it, and what it is called here; the first that fits.
_PARAM_RENAMES = (
    (re.compile(r"^tools\[(\d+)\]\.function\b"), r"tools[\1]"),
    (re.compile(r"^response_format(\.json_schema)?\b"), "text.format"),
    (re.compile(r"^tool_choice\.(function|allowed_tools)\b"), "tool_choice"),
    (re.compile(r"^reasoning_effort$"), "reasoning.effort"),
    (re.compile(r"^verbosity$"), "text.verbosity"),
    (re.compile(r"^max_(completion_)?tokens$"), "max_output_tokens"),
    (re.compile(r"\.tool_call_id$"), ".call_id"),
)
_MESSAGE_PATH = re.compile(r"^messages(?:\[(\d+)\])?(?:\.tool_calls\[(\d+)\](?:\.function)?)?")


def _rename_params(refusal: Refusal, origins: Sequence[ItemOrigin]) -> Refusal:
    if refusal.param is None:
        return refusal
    param = _MESSAGE_PATH.sub(lambda found: _input_path(found[1], found[2], origins), refusal.param)
    for pattern, name in _PARAM_RENAMES:
        param = pattern.sub(name, param)
    message = refusal.message.replace(f"'{refusal.param}'", f"'{param}'")
    return dataclasses.replace(refusal, param=param, message=message)


def _input_path(message: str | None, call: str | None, origins: Sequence[ItemOrigin]) -> str:
    origin = ItemOrigin(None) if message is None else origins[int(message)]
    item = origin.item if call is None else origin.calls[int(call)]
    return "input" if item is None else f"input[{item}]"
