"""Translates Anthropic's requests to OpenAI's: body fields, messages, tools and results. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
import orjson

from gateway.apis.adapter import check_messages, decode, without_nones
from gateway.apis.anthropic import context_edits
from gateway.apis.anthropic.context_edits import AppliedEdit, ContextManagement
from schemas.wire.errors import RefusedError, invalid

Block: TypeAlias = dict[str, Any]

# Separates the texts of blocks that become one text.
_BETWEEN = "\n\n"
# Fields of each type of block that must be there; others are ignored.
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "text": ("text",),
    "image": ("source",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}
# Of tools that ran at Anthropic's servers; a history of them is left out.
_SERVER_BLOCKS = (
        "bash_code_execution_tool_result", "code_execution_tool_result", "compaction", "container_upload",
        "fallback", "mcp_tool_result", "mcp_tool_use", "server_tool_use", "text_editor_code_execution_tool_result",
        "tool_search_tool_result", "web_fetch_tool_result", "web_search_tool_result",
)  # fmt: skip
_TYPES: Mapping[str, type] = {
    "text": str, "thinking": str, "id": str, "name": str, "tool_use_id": str, "input": dict,
    "source": dict,
}  # fmt: skip
_KINDS = {
    "system": ("text",),
    "user": ("text", "image", "tool_result"),
    "result": ("text", "image"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
# Thinking budgets from which effort is medium or high: chat templates know words, not numbers.
# Anthropic's minimum is 1,024.
_MEDIUM_TOKENS, _HIGH_TOKENS = 4096, 16384
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
_TOOL_FIELDS = frozenset(
    {
        "type", "name", "description", "input_schema", "strict", "cache_control",
        "eager_input_streaming", "input_examples", "defer_loading", "allowed_callers",
    }
)  # fmt: skip
# OpenAI's names for these fields.
_MEANT = {
    "max_completion_tokens": "max_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}
# The fields that counting has, too.
_MEANT_OF_COUNTS = {name: _MEANT[name] for name in ("reasoning_effort", "response_format")}


class AnthropicMessage(msgspec.Struct):
    """One turn. Clients send back whole answers, so other fields are ignored."""

    role: str
    content: str | list[Block]


def system_messages(given: str | list[Block] | None) -> list[dict[str, Any]]:
    """Return the system message; empty if there is no text.

    Raises:
        RefusedError: a block is not text.

    """
    text = given if isinstance(given, str) else _texts(given or (), "system", "system")
    return [{"role": "system", "content": text}] if text else []


class _Turn:
    """One turn, as neighbours with the same role make it: its pieces are joined once, at its end."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.texts: list[str] = []
        """Texts before the first image."""
        self.parts: list[Block] = []
        """All parts from the first image on; texts before it are one part."""
        self.thoughts: list[str] = []
        self.calls: list[dict[str, Any]] = []

    def add_text(self, text: str) -> None:
        if not self.parts:
            self.texts.append(text)
        elif text:
            self.parts.append({"type": "text", "text": text})

    def add_image(self, part: Block) -> None:
        if not self.parts and (text := _joined(self.texts)):
            self.parts.append({"type": "text", "text": text})
        self.parts.append(part)

    def message(self) -> dict[str, Any]:
        """Return OpenAI's message."""
        message: dict[str, Any] = {"role": self.role, "content": self.parts or _joined(self.texts)}
        if self.thoughts:
            message["reasoning_content"] = _joined(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


def _joined(texts: Sequence[str]) -> str:
    return _BETWEEN.join(text for text in texts if text)


def translate_messages(messages: Sequence[AnthropicMessage]) -> list[dict[str, Any]]:
    """Return the messages; neighbours with the same role become one turn, as in Anthropic's API.

    Raises:
        RefusedError: there are too many, or a block is unknown or not supported.

    """
    check_messages(messages)
    turns: list[_Turn | dict[str, Any]] = []
    called: set[str] = set()  # ids of the calls so far

    def turn_of(role: str) -> _Turn:
        last = turns[-1] if turns else None
        if not isinstance(last, _Turn) or last.role != role:
            last = _Turn(role)
            turns.append(last)
        return last

    for index, message in enumerate(messages):
        role, where = message.role, f"messages[{index}]"
        if role not in _KINDS:
            raise invalid(
                f"Invalid '{where}.role': it must be user, assistant or system.",
                param=f"{where}.role",
            )
        if isinstance(message.content, str):
            turn_of(role).add_text(message.content)
        elif role == "assistant":
            _add_assistant(turn_of(role), message.content, called, f"{where}.content")
        else:
            for at, block in enumerate(message.content):
                here = f"{where}.content[{at}]"
                kind = _kind(block, role, here)
                if kind == "tool_result":
                    if block["tool_use_id"] not in called:
                        raise _no_such_call(block["tool_use_id"], here)
                    result = {"role": "tool", "tool_call_id": block["tool_use_id"]}
                    turns.append({**result, "content": _result(block, here)})
                elif kind == "image":
                    turn_of(role).add_image(_image(block, here))
                else:
                    turn_of(role).add_text(block["text"])
    if turns and isinstance(turns[-1], _Turn) and turns[-1].role == "assistant":
        raise invalid(
            "The last message is the assistant's, and this fleet's models do not continue a begun answer "
            "(prefill). End with a message of the user.",
            param="messages",
        )
    return [turn.message() if isinstance(turn, _Turn) else turn for turn in turns]


def _add_assistant(turn: _Turn, blocks: Sequence[Block], called: set[str], where: str) -> None:
    """Add the blocks of an assistant's message to its turn, and the ids of its calls to `called`."""
    for at, block in enumerate(blocks):
        if block.get("type") in _SERVER_BLOCKS:
            continue
        kind = _kind(block, "assistant", f"{where}[{at}]")
        if kind == "text":
            turn.add_text(block["text"])
        elif kind == "thinking":
            turn.thoughts.append(block["thinking"])
        elif kind == "tool_use":
            arguments = orjson.dumps(block["input"]).decode()
            function = {"name": block["name"], "arguments": arguments}
            turn.calls.append({"id": block["id"], "type": "function", "function": function})
            called.add(block["id"])


def _image(block: Block, where: str) -> Block:
    """Return OpenAI's part for an image; the engine decides whether it takes it."""
    source = block["source"]
    match source.get("type"):
        case "base64" if isinstance(source.get("data"), str):
            url = f"data:{source.get('media_type') or 'image/png'};base64,{source['data']}"
        case "url" if isinstance(source.get("url"), str):
            url = source["url"]
        case _:
            raise invalid(
                f"Invalid '{where}.source': an image needs a source of type 'base64' with 'media_type' and 'data'.",
                param=f"{where}.source",
            )
    return {"type": "image_url", "image_url": {"url": url}}


def _result(block: Block, where: str) -> str | list[Block]:
    given = block.get("content")
    if isinstance(given, list) and any(_is_image(part) for part in given):
        return [
            _image(part, here) if kind == "image" else {"type": "text", "text": part["text"]}
            for at, part in enumerate(given)
            if (here := f"{where}.content[{at}]") and (kind := _kind(part, "result", here))
        ]
    text = given if isinstance(given, str) else _texts(given or (), "system", f"{where}.content")
    # Chat templates have no field for it, and models understand the prefix.
    return f"Error: {text}" if block.get("is_error") else text


def _is_image(block: object) -> bool:
    return isinstance(block, dict) and block.get("type") == "image"


def _texts(blocks: Sequence[Block], role: str, where: str) -> str:
    for at, block in enumerate(blocks):
        _kind(block, role, f"{where}[{at}]")
    return _BETWEEN.join(block["text"] for block in blocks)


def _kind(block: object, role: str, where: str) -> str:
    """Return the type of a block.

    Raises:
        RefusedError: the block is not valid in this place.

    """
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(block, dict) or not isinstance(kind, str) or kind not in _KINDS[role]:
        raise _no_such_block(kind, role, where)
    for name in _FIELDS[kind]:
        if not isinstance(block.get(name), _TYPES[name]):
            what = "an object" if _TYPES[name] is dict else "a string"
            raise invalid(f"Invalid '{where}.{name}': it must be {what}.", param=f"{where}.{name}")
    return kind


def _no_such_call(call: str, where: str) -> RefusedError:
    """Return the refusal of a tool result without its call; an engine would refuse it in OpenAI's words."""
    message = (
        f"Invalid '{where}.tool_use_id': a tool_result answers a tool_use of the assistant in a message before "
        f"it, and none has the id {call[:100]!r}; send the message with that tool_use, too."
    )
    return invalid(message, param=f"{where}.tool_use_id")


def _no_such_block(kind: object, role: str, where: str) -> RefusedError:
    if kind in ("image", "document"):
        message = f"No {kind} can stand here; send it as text, or an image in a block of the user."
    else:
        known = " or ".join(_KINDS[role])
        message = f"A block of type {str(kind)[:100]!r} cannot stand here; it must be {known}."
    return invalid(f"Invalid '{where}': {message}", param=where)


class ThinkingOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Thinking budget and display."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """Choice of tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True):
    """Format of the text."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """Effort and format of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class RequestMetadata(msgspec.Struct, forbid_unknown_fields=True):
    """Metadata of the client."""

    user_id: str | None = None


class CountBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `/v1/messages/count_tokens`."""

    model: str
    messages: list[AnthropicMessage]
    system: str | list[Block] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: Any = None
    context_management: ContextManagement | None = None
    speed: Any = None
    mcp_servers: list[Any] | None = None


class MessagesBody(CountBody, forbid_unknown_fields=True, kw_only=True):
    """Body of `/v1/messages`."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: RequestMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: Any = None
    diagnostics: Any = None
    user_profile_id: Any = None
    container: Any = None


_COUNT = msgspec.json.Decoder(CountBody)
_MESSAGES = msgspec.json.Decoder(MessagesBody)


def read_messages(body: bytes) -> MessagesBody:
    """Return the decoded body of a message request.

    Raises:
        RefusedError: the body is invalid or asks for something unsupported.

    """
    body_fields = decode(_MESSAGES, body, _MEANT)
    if body_fields.max_tokens < 1:
        raise invalid("'max_tokens' must be at least 1.", param="max_tokens")
    if body_fields.temperature is not None and not 0 <= body_fields.temperature <= 1:
        raise invalid("'temperature' must be between 0 and 1.", param="temperature")
    if body_fields.container is not None:
        raise invalid("This fleet runs no code for models; leave 'container' out.", "container")
    return body_fields


def read_count(body: bytes) -> CountBody:
    """Return the decoded body of a token count request.

    Raises:
        RefusedError: the body is invalid.

    """
    return decode(_COUNT, body, _MEANT_OF_COUNTS)


def edit_context(body_fields: CountBody) -> list[AppliedEdit] | None:
    """Clear what a request asks to be cleared from its messages; return what was done, None if it asks for nothing."""
    management = body_fields.context_management
    if management is None:
        return None
    check_messages(body_fields.messages)
    contents = [(message.role, message.content) for message in body_fields.messages]
    others = orjson.dumps([body_fields.system, body_fields.tools])
    return context_edits.apply(management, contents, len(others))


def messages_to_chat(body_fields: MessagesBody) -> dict[str, Any]:
    """Return the request as an OpenAI chat request.

    Raises:
        RefusedError: a field has no equivalent.

    """
    body = {
        **count_to_chat(body_fields),
        **without_nones(
            temperature=body_fields.temperature,
            top_p=body_fields.top_p,
            top_k=body_fields.top_k,
            stop=body_fields.stop_sequences or None,
        ),
        "max_tokens": body_fields.max_tokens,
        "fit_max_tokens": True,
    }
    if (
        body_fields.tools
        and body_fields.tool_choice
        and body_fields.tool_choice.disable_parallel_tool_use
    ):
        body["parallel_tool_calls"] = False
    if body_fields.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def count_to_chat(body_fields: CountBody) -> dict[str, Any]:
    """Return the fields that form the prompt, in OpenAI's format.

    Raises:
        RefusedError: a field has no equivalent.

    """
    if body_fields.mcp_servers:
        raise invalid(
            "This fleet calls no MCP servers; give their tools in 'tools'.", "mcp_servers"
        )
    found = translate_messages(body_fields.messages)
    body: dict[str, Any] = {
        "model": body_fields.model,
        "messages": [*system_messages(body_fields.system), *found],
    }
    if body_fields.tools:
        body["tools"] = [_tool(tool, f"tools[{at}]") for at, tool in enumerate(body_fields.tools)]
    if body_fields.tool_choice is not None:
        body["tool_choice"] = _choice(body_fields.tool_choice)
    body |= _effort_fields(body_fields)
    wanted = body_fields.output_format or (
        body_fields.output_config and body_fields.output_config.format
    )
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
        raise invalid(f"Unknown field '{name[:100]}' in '{where}'.", param=where)
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


def _effort_fields(body_fields: CountBody) -> dict[str, Any]:
    """Return the fields of the reasoning effort; without any it is left to the model."""
    thinking, output = body_fields.thinking, body_fields.output_config
    if thinking is not None and thinking.type == "disabled":
        return {"reasoning_effort": "none"}
    # Clients send both to every model: variables that a template does not read change nothing.
    if output is not None and output.effort is not None:
        return _effort_variables(_EFFORTS[output.effort])
    if thinking is None or thinking.type == "adaptive":
        return {}
    budget = thinking.budget_tokens or 0
    if budget < _MEDIUM_TOKENS:
        return _effort_variables("low")
    return _effort_variables("medium" if budget < _HIGH_TOKENS else "high")


def _effort_variables(effort: str) -> dict[str, Any]:
    switches = {"enable_thinking": True, "thinking": True}
    return {"chat_template_kwargs": {"reasoning_effort": effort, **switches}}
