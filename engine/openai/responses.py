"""Requests of `/v1/responses`, without its stateful part: each becomes the equivalent chat request. Pure.

A chat's rules therefore hold here too, and a refusal names the parameters of this endpoint. The response is in
response_events.py. The gateway stores responses, and puts the input of earlier ones in front of a request's own.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias

import orjson
from pydantic import BaseModel, ConfigDict, Field, Tag

from engine.openai import input_items, request_body, response_tools
from engine.openai.input_items import ChatTranscript, Item, ItemOrigin
from engine.openai.parameters import (
    LIMITED_CHAT,
    EndpointParameters,
    LenientModel,
    LimitedParameter,
    StrictModel,
)
from engine.openai.request_body import USUAL_POLICY, GenerationRequest, RequestPolicy
from engine.openai.response_tools import AnyTool, ResponseTool, type_discriminator
from schemas.sampling import Sampling
from schemas.wire import errors
from schemas.wire.errors import Refusal, RefusedError
from schemas.wire.streams import RESUME_FIELD

Json: TypeAlias = dict[str, Any]

_STATELESS = "An engine does not store responses or conversations; send the whole input."


class NamedTool(StrictModel):
    """The function or the freeform tool that must be called."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class AllowedTools(StrictModel):
    """The tools that may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


ToolChoice: TypeAlias = Annotated[
    Annotated[NamedTool, Tag("a function")]
    | Annotated[NamedTool, Tag("a custom")]
    | Annotated[AllowedTools, Tag("a allowed_tools")],
    type_discriminator(),
]


class PlainFormat(StrictModel):
    """Text."""

    type: Literal["text"]


class ObjectFormat(StrictModel):
    """Any JSON object."""

    type: Literal["json_object"]


class SchemaFormat(StrictModel):
    """JSON that matches a schema."""

    model_config = ConfigDict(serialize_by_alias=True)

    type: Literal["json_schema"]
    name: str
    shape: Json = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


AnyFormat: TypeAlias = Annotated[
    Annotated[PlainFormat, Tag("a text")]
    | Annotated[ObjectFormat, Tag("a json_object")]
    | Annotated[SchemaFormat, Tag("a json_schema")],
    type_discriminator(),
]


class TextConfig(StrictModel):
    """Format and length of the text."""

    format: AnyFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(StrictModel):
    """Reasoning effort; the reasoning itself is in the answer, so that a summary adds nothing."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class StreamOptions(StrictModel):
    """Options of a stream; events are never padded."""

    include_obfuscation: Literal[False] | None = None


class ResponsesBody(LenientModel):
    """Body of `/v1/responses`."""

    model: str
    input: str | Annotated[list[Item], Field(min_length=1)]
    client_metadata: Json | None = None
    include: list[str] | None = None
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
    tools: list[AnyTool] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    user: str | None = None
    session_id: request_body.SessionId | None = None
    cache_salt: request_body.CacheSalt | None = None


# Of hosted tools that are left out, and of what an answer has anyway.
_INCLUDED = frozenset(
    {
        "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
        "message.input_image.image_url", "reasoning.encrypted_content", "web_search_call.action.sources",
        "web_search_call.results",
    }
)  # fmt: skip
# Fields of stored responses, which gateways have.
_STATE = frozenset({"background", "previous_response_id", "store"})
_LIMITED: Mapping[str, LimitedParameter] = {
    "background": LimitedParameter(values=(False,), reason=_STATELESS),
    "context_management": LimitedParameter(
        values=([],), reason="This engine does not shorten a context."
    ),
    "conversation": LimitedParameter(reason=_STATELESS),
    "max_tool_calls": LimitedParameter(reason="This engine does not call tools itself."),
    "moderation": LimitedParameter(reason="This engine does not moderate content."),
    "previous_response_id": LimitedParameter(reason=_STATELESS),
    "prompt": LimitedParameter(
        reason="This engine does not store prompts; send 'instructions' and 'input'."
    ),
    "prompt_cache_options": LIMITED_CHAT["prompt_cache_options"],
    "prompt_cache_retention": LIMITED_CHAT["prompt_cache_retention"],
    "service_tier": LIMITED_CHAT["service_tier"],
    "store": LimitedParameter(values=(False, True), reason=_STATELESS),
    "top_logprobs": LimitedParameter(
        values=(0,), reason="Use /v1/chat/completions for log probabilities."
    ),
    "truncation": LimitedParameter(
        values=("disabled", "auto"), reason="An input that is too long is refused."
    ),
}


PARAMETERS: Final = EndpointParameters(model=ResponsesBody, limited=_LIMITED, takes_others=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest:
    """One checked request for a response."""

    chat: GenerationRequest
    """The equivalent chat request."""
    origins: tuple[ItemOrigin, ...]
    """The input items of each message of the chat."""
    echo: Json
    """Fields of the request that the response repeats."""
    tools: Mapping[str, ResponseTool]
    """By the names that the model sees."""

    @property
    def model(self) -> str:
        """The name of the requested model."""
        return self.chat.model

    def rename_params(self, refusal: Refusal) -> Refusal:
        """Return a chat's refusal with the parameter names of this endpoint."""
        return _rename_params(refusal, self.origins, tuple(self.tools.values()))


def parse(
    raw: bytes, *, is_resumable: bool = False, policy: RequestPolicy = USUAL_POLICY
) -> ResponsesRequest:
    """Parse a body; the field `fleet` is allowed only with `is_resumable`.

    Raises:
        RefusedError: a value is wrong or not supported.

    """
    fields = request_body.read_object(raw)
    resumed = fields.pop(RESUME_FIELD, None) if is_resumable else None
    # A gateway has resolved them.
    resolved = _STATE & fields.keys() if is_resumable else ()
    state = {name: fields.pop(name) for name in resolved}
    ignored = PARAMETERS.check(fields, refuses_unknown=policy.refuses_unknown)
    left_out = input_items.normalize(fields.get("input"), sees_images=policy.sees_images)
    hosted = response_tools.drop_hosted(fields)
    if hosted and policy.refuses_unknown:
        raise errors.invalid(
            f"This engine does not run '{hosted[0]}'; use 'function' or 'custom'.", param="tools"
        )
    body = request_body.validate(ResponsesBody, fields)
    _check_include(body.include or ())
    if body.stream_options is not None and not body.stream:
        raise errors.invalid(
            "'stream_options' is only allowed when 'stream' is true.", param="stream_options"
        )
    chat = input_items.to_chat(body.input, body.instructions)
    origins = tuple(chat.origins)
    tools = tuple(response_tools.flatten(body.tools or []))
    identities = tuple(identity for identity, _ in tools)
    try:
        chat_body = _chat_body(body, chat)
        chat_body["tools"] = [
            response_tools.chat_tool(tool, identity.namespace) for identity, tool in tools
        ]
        if resumed is not None:
            chat_body[RESUME_FIELD] = resumed
        request = request_body.parse_chat(
            orjson.dumps(chat_body), is_resumable=is_resumable, policy=policy
        )
    except RefusedError as error:
        raise RefusedError(_rename_params(error.refusal, origins, identities)) from error
    others = (_renamed(name) for name in request.ignored)
    request = dataclasses.replace(request, ignored=(*ignored, *hosted, *left_out, *others))
    return ResponsesRequest(
        chat=request,
        origins=origins,
        echo=_echoed_fields(body, policy.sampling) | state,
        tools={response_tools.chat_name(tool.name, tool.namespace): tool for tool in identities},
    )


def _check_include(names: Sequence[str]) -> None:
    for name in names:
        if name not in _INCLUDED:
            raise errors.invalid(
                f"'{name[:100]}' cannot be included: an answer always has all of its output, with its reasoning as "
                "text, and /v1/chat/completions has log probabilities.",
                param="include",
            )


def _chat_body(body: ResponsesBody, chat: ChatTranscript) -> Json:
    text = body.text or TextConfig()
    chat_body: Json = {
        "model": body.model,
        "cache_salt": body.cache_salt,
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
        "top_p": body.top_p,
        "user": body.user,
        "verbosity": text.verbosity,
    }
    return {name: value for name, value in chat_body.items() if value is not None}


def _chat_response_format(text_format: AnyFormat | None) -> Json | None:
    if not isinstance(text_format, SchemaFormat):
        return None if text_format is None else {"type": text_format.type}
    spec = text_format.model_dump(exclude={"type"}, exclude_none=True)
    return {"type": "json_schema", "json_schema": spec}


def _chat_tool_choice(choice: str | NamedTool | AllowedTools | None) -> str | Json | None:
    if isinstance(choice, NamedTool):
        return _chat_named(choice)
    if isinstance(choice, AllowedTools):
        tools = [_chat_named(tool) for tool in choice.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    return choice


def _chat_named(tool: NamedTool) -> Json:
    name = response_tools.chat_name(tool.name, tool.namespace)
    return {"type": "function", "function": {"name": name}}


def _echoed_fields(body: ResponsesBody, sampling: Sampling) -> Json:
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
        "temperature": _first(body.temperature, sampling.temperature, 1.0),
        "text": {"format": format_, "verbosity": "medium"},
        "tool_choice": choice.model_dump() if isinstance(choice, BaseModel) else choice or "auto",
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_logprobs": 0,
        "top_p": _first(body.top_p, sampling.top_p, 1.0),
        "truncation": "disabled",
        "user": body.user,
    }


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


# A chat's path of a parameter, and the path here.
_PARAM_RENAMES = (
    (re.compile(r"^response_format(\.json_schema)?\b"), "text.format"),
    (re.compile(r"^tool_choice\.(function|allowed_tools)\b"), "tool_choice"),
    (re.compile(r"^reasoning_effort$"), "reasoning.effort"),
    (re.compile(r"^verbosity$"), "text.verbosity"),
    (re.compile(r"^max_(completion_)?tokens$"), "max_output_tokens"),
    (re.compile(r"\.tool_call_id$"), ".call_id"),
    (re.compile(r"\.image_url\.url$"), ".image_url"),
)
_TOOL_PATH = re.compile(r"^tools\[(\d+)\]\.function\b")
_MESSAGE_PATH = re.compile(
    r"^messages(?:\[(\d+)\])?(?:\.tool_calls\[(\d+)\](?:\.function)?)?(\.content)?"
)


def _rename_params(
    refusal: Refusal, origins: Sequence[ItemOrigin], tools: Sequence[ResponseTool]
) -> Refusal:
    if refusal.param is None:
        return refusal
    param = _MESSAGE_PATH.sub(lambda match: _input_path(match, origins), refusal.param)
    param = _TOOL_PATH.sub(lambda match: tools[int(match[1])].path, param)
    param = _renamed(param)
    message = refusal.message.replace(f"'{refusal.param}'", f"'{param}'")
    return dataclasses.replace(refusal, param=param, message=message)


def _renamed(param: str) -> str:
    for pattern, name in _PARAM_RENAMES:
        param = pattern.sub(name, param)
    return param


def _input_path(match: re.Match[str], origins: Sequence[ItemOrigin]) -> str:
    message, call, content = match.groups()
    origin = ItemOrigin(None) if message is None else origins[int(message)]
    item = origin.item if call is None else origin.calls[int(call)]
    if item is None:
        return f"input{content or ''}"
    return f"input[{item}]" if content is None else f"input[{item}].{origin.content}"
