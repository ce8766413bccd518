"""Anthropic's requests as OpenAI's. Pure: bytes in, the engine's body out."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from gateway.errors import invalid
from gateway.surfaces.anthropic import content
from gateway.surfaces.anthropic.content import Message
from gateway.surfaces.asking import decode, without_nones

# What of a budget for thinking is which effort: templates know words, not numbers. Anthropic's least is 1,024.
_MEDIUM_TOKENS, _HIGH_TOKENS = 4096, 16384
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
_TOOL_FIELDS = frozenset(
    {
        "type", "name", "description", "input_schema", "strict", "cache_control",
        "eager_input_streaming", "input_examples", "defer_loading", "allowed_callers",
    }
)  # fmt: skip


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    """Whether and how much to think, and whether to show it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """Which tools are to be used."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Format(msgspec.Struct, forbid_unknown_fields=True):
    """What the text has to match."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class Output(msgspec.Struct, forbid_unknown_fields=True):
    """How the answer is to be."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Format | None = None


class Metadata(msgspec.Struct, forbid_unknown_fields=True):
    """Who asks."""

    user_id: str | None = None


class CountBody(msgspec.Struct, forbid_unknown_fields=True):
    """What `/v1/messages/count_tokens` takes."""

    model: str
    messages: list[Message]
    system: str | list[content.Block] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: Output | None = None
    output_format: Format | None = None
    cache_control: Any = None
    context_management: Any = None
    speed: Any = None
    mcp_servers: list[Any] | None = None


class MessagesBody(CountBody, forbid_unknown_fields=True, kw_only=True):
    """What `/v1/messages` takes."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: Any = None
    diagnostics: Any = None
    user_profile_id: Any = None
    container: Any = None


# What OpenAI's clients call it.
_MEANT = {
    "max_completion_tokens": "max_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}
# Counting takes no such field.
_MEANT_OF_COUNTS = {name: _MEANT[name] for name in ("reasoning_effort", "response_format")}

_COUNT = msgspec.json.Decoder(CountBody)
_MESSAGES = msgspec.json.Decoder(MessagesBody)


def read_messages(body: bytes) -> MessagesBody:
    """Return the body of a request for an answer.

    Raises:
        RefusedError: it is none, or asks for what is not done.

    """
    asked = decode(_MESSAGES, MessagesBody, body, _MEANT)
    if asked.max_tokens < 1:
        raise invalid("'max_tokens' must be at least 1.", param="max_tokens")
    if asked.temperature is not None and not 0 <= asked.temperature <= 1:
        raise invalid("'temperature' must be between 0 and 1.", param="temperature")
    if asked.container is not None:
        raise invalid("This fleet runs no code for models; leave 'container' out.", "container")
    return asked


def read_count(body: bytes) -> CountBody:
    """Return the body of a request to count tokens.

    Raises:
        RefusedError: it is none.

    """
    return decode(_COUNT, CountBody, body, _MEANT_OF_COUNTS)


def messages(asked: MessagesBody) -> dict[str, Any]:
    """Return the request as a chat of OpenAI's.

    Raises:
        RefusedError: something in it has no like there.

    """
    body = {
        **count(asked),
        **without_nones(
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            stop=asked.stop_sequences or None,
        ),
        "max_tokens": asked.max_tokens,
        "fit_max_tokens": True,
    }
    if asked.tools and asked.tool_choice and asked.tool_choice.disable_parallel_tool_use:
        body["parallel_tool_calls"] = False
    if asked.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def count(asked: CountBody) -> dict[str, Any]:
    """Return what of a request the prompt is made of, in OpenAI's words.

    Raises:
        RefusedError: something in it has no like there.

    """
    if asked.mcp_servers:
        raise invalid(
            "This fleet calls no MCP servers; give their tools in 'tools'.", "mcp_servers"
        )
    found = content.translate(asked.messages)
    body: dict[str, Any] = {
        "model": asked.model,
        "messages": [*content.system(asked.system), *found],
    }
    if asked.tools:
        body["tools"] = [_tool(tool, f"tools[{at}]") for at, tool in enumerate(asked.tools)]
    if asked.tool_choice is not None:
        body["tool_choice"] = _choice(asked.tool_choice)
    effort = _effort(asked)
    if effort is not None:
        body["reasoning_effort"] = effort
    wanted = asked.output_format or (asked.output_config and asked.output_config.format)
    if wanted:
        schema = {"name": "answer", "schema": wanted.schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise invalid(
            f"Invalid '{where}.type': tools of Anthropic's own ({str(kind)[:100]}) run on their servers or belong to "
            "their models; give a tool with a name and an input_schema, and run it yourself.",
            param=f"{where}.type",
        )
    for name in tool.keys() - _TOOL_FIELDS:
        raise invalid(f"'{name[:100]}' is not known in '{where}'.", param=where)
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise invalid(
            f"Invalid '{where}.input_schema': it must be a JSON schema, as an object.",
            param=f"{where}.input_schema",
        )
    function = without_nones(
        name=tool.get("name"),
        description=tool.get("description"),
        strict=tool.get("strict"),
        parameters=schema,
    )
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice) -> object:
    match choice.type:
        case "any":
            return "required"
        case "tool":
            return {"type": "function", "function": {"name": choice.name}}
        case "auto" | "none":
            return choice.type


def _effort(asked: CountBody) -> str | None:
    """Return how much to think; None leaves it to the model."""
    thinking = asked.thinking
    if thinking is not None and thinking.type == "disabled":
        return "none"
    if asked.output_config is not None and asked.output_config.effort is not None:
        return _EFFORTS[asked.output_config.effort]
    if thinking is None or thinking.type == "adaptive":
        return None
    budget = thinking.budget_tokens or 0
    if budget < _MEDIUM_TOKENS:
        return "low"
    return "medium" if budget < _HIGH_TOKENS else "high"
