"""The messages of a chat: OpenAI's shapes in, what chat templates take out. Knows no template.

Templates on Hugging Face take a call's arguments as an object and a result with its function's name;
OpenAI's clients send the arguments as JSON in a string and the result with the call's id.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import orjson
from pydantic import BaseModel, ConfigDict, Field

from engine import errors
from engine.ports import Message

_STRICT = ConfigDict(strict=True, extra="forbid")
# What a reply of OpenAI's has besides, when a client sends it back as history: empty in ours.
_EMPTY_FIELDS = ("annotations", "audio", "function_call")
ROLES = ("system", "developer", "user", "assistant", "tool")
Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=256)]


class TextPart(BaseModel):
    """A piece of a message."""

    model_config = _STRICT

    type: Literal["text"]
    text: str


class RefusalPart(BaseModel):
    """A piece of what an assistant said instead of an answer."""

    model_config = _STRICT

    type: Literal["refusal"]
    refusal: str


class PromptMessage(BaseModel):
    """What the model is told before and between the turns, or by its user."""

    model_config = _STRICT

    role: Literal["system", "developer", "user"]
    content: str | list[TextPart]
    name: Name | None = None


class MessageFunction(BaseModel):
    """Which function an assistant called, and with what."""

    model_config = _STRICT

    name: Annotated[str, Field(min_length=1)]
    arguments: str


class MessageToolCall(BaseModel):
    """One call of an assistant."""

    model_config = _STRICT

    id: str
    type: Literal["function"] = "function"
    function: MessageFunction
    index: int | None = None
    """In a piece of a stream; clients that join pieces leave it there."""


class AssistantMessage(BaseModel):
    """What the assistant said before."""

    model_config = _STRICT

    role: Literal["assistant"]
    content: str | list[TextPart | RefusalPart] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    name: Name | None = None


class ToolMessage(BaseModel):
    """What a tool gave back."""

    model_config = _STRICT

    role: Literal["tool"]
    tool_call_id: str
    content: str | list[TextPart]


AnyMessage: TypeAlias = Annotated[
    PromptMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


def normalize(messages: object) -> None:
    """Refuse with a sentence what pydantic would report as a wrong type; drop empty extras.

    Raises:
        RefusedError: a message has what this engine does not take.

    """
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, dict):
            continue
        where = f"messages[{index}]"
        _check_role(message.get("role"), where)
        for name in _EMPTY_FIELDS:
            if name in message and message.pop(name):
                raise errors.invalid(
                    f"This engine does not support '{name}' in messages.", param=f"{where}.{name}"
                )
        content = message.get("content")
        for at, part in enumerate(content if isinstance(content, list) else ()):
            _check_part(part, f"{where}.content[{at}]")


def _check_role(role: object, where: str) -> None:
    if role == "function":
        raise errors.invalid(
            "Messages of the role 'function' are deprecated; use the role 'tool'.",
            param=f"{where}.role",
        )
    if role not in ROLES:
        raise errors.invalid(
            f"Invalid '{where}.role': it must be one of {', '.join(ROLES)}.", param=f"{where}.role"
        )


def _check_part(part: object, where: str) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind not in ("text", "refusal"):
        raise errors.invalid(
            f"This model takes text only; a part of type '{kind[:50]}' is not supported.",
            param=f"{where}.type",
        )


def to_template(messages: Sequence[AnyMessage]) -> tuple[Message, ...]:
    """Return the messages as templates take them.

    Raises:
        RefusedError: a call or a result makes no sense where it stands.

    """
    called: dict[str, str] = {}  # the function of each call so far, by the call's id
    found: list[Message] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if isinstance(message, PromptMessage):
            found.append(_prompt_message(message))
        elif isinstance(message, AssistantMessage):
            found.append(_assistant_message(message, where))
            called |= {call.id: call.function.name for call in message.tool_calls or ()}
        else:
            found.append(_tool_message(message, called, where))
    return tuple(found)


def _prompt_message(message: PromptMessage) -> Message:
    # Templates know `system`; `developer` is what OpenAI calls it since its reasoning models.
    role = "system" if message.role == "developer" else message.role
    named = {} if message.name is None else {"name": message.name}
    return {"role": role, "content": _text(message.content), **named}


def _assistant_message(message: AssistantMessage, where: str) -> Message:
    if message.content is None and message.refusal is None and not message.tool_calls:
        raise errors.invalid(
            "An assistant's message needs 'content', or 'tool_calls' instead.",
            param=f"{where}.content",
        )
    shown: Message = {
        "role": "assistant",
        "content": _text(message.content or "") + (message.refusal or ""),
    }
    if message.name is not None:
        shown["name"] = message.name
    if message.reasoning_content:
        shown["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        shown["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{at}]")
            for at, call in enumerate(message.tool_calls)
        ]
    return shown


def _tool_call(call: MessageToolCall, where: str) -> Message:
    try:
        arguments = orjson.loads(call.function.arguments or "{}")
    except orjson.JSONDecodeError as error:
        raise errors.invalid(
            f"The arguments of a call must be JSON in a string: {error}",
            param=f"{where}.function.arguments",
        ) from error
    if not isinstance(arguments, dict):
        raise errors.invalid(
            "The arguments of a call must be a JSON object in a string.",
            param=f"{where}.function.arguments",
        )
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _tool_message(message: ToolMessage, called: Mapping[str, str], where: str) -> Message:
    name = called.get(message.tool_call_id)
    if name is None:
        raise errors.invalid(
            "A message of the role 'tool' must answer a call in the 'tool_calls' of an assistant's "
            f"message before it; none has the id '{message.tool_call_id[:100]}'.",
            param=f"{where}.tool_call_id",
        )
    return {
        "role": "tool",
        "tool_call_id": message.tool_call_id,
        "name": name,
        "content": _text(message.content),
    }


def _text(content: str | Sequence[TextPart | RefusalPart]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)


def text_length(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return about how many characters a template will write of these messages."""
    return sum(
        len(message["content"])
        + len(message.get("reasoning_content", ""))
        + sum(len(str(call)) for call in message.get("tool_calls", ()))
        for message in messages
    )
