"""Ollama's messages as OpenAI's: calls get the ids that Ollama does without. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec
import orjson

from gateway.errors import RefusedError, invalid

NO_IMAGES = (
    "The models of this fleet read text only; leave 'images' out, or describe them in the text."
)


class Function(msgspec.Struct, forbid_unknown_fields=True):
    """What was called."""

    name: str
    arguments: dict[str, Any] | str | None = None
    index: int | None = None
    description: str | None = None


class Call(msgspec.Struct, forbid_unknown_fields=True):
    """A call of before."""

    function: Function
    id: str | None = None
    type: str | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


def translate(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages as an engine takes them.

    Raises:
        RefusedError: a message has images, or a result answers no call.

    """
    waiting: list[tuple[str, str]] = []  # ids and names of the calls without a result so far
    found: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if message.images:
            raise invalid(NO_IMAGES, param=f"messages[{index}].images")
        shown: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            shown["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = [
                _call(call, f"call_{index}_{at}") for at, call in enumerate(message.tool_calls)
            ]
            shown["tool_calls"] = calls
            waiting = [(call["id"], call["function"]["name"]) for call in calls]
        if message.role == "tool":
            call = _answered(message, waiting)
            if call is None:
                raise _answers_nothing(index)
            waiting.remove(call)
            shown["tool_call_id"] = call[0]
        found.append(shown)
    return found


def _call(call: Call, id_: str) -> dict[str, Any]:
    given = call.function.arguments
    arguments = given if isinstance(given, str) else orjson.dumps(given or {}).decode()
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id or id_, "type": "function", "function": function}


def _answered(message: Message, waiting: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
    """Return the call that a result belongs to: by its id, else by its name, else by its place."""
    for call in waiting:
        if message.tool_call_id:
            if call[0] == message.tool_call_id:
                return call
        elif not message.tool_name or call[1] == message.tool_name:
            return call
    return None


def _answers_nothing(index: int) -> RefusedError:
    return invalid(
        "A message of the role 'tool' must follow an assistant's message whose 'tool_calls' it answers, one "
        "message a call; name the function in 'tool_name'.",
        param=f"messages[{index}]",
    )
