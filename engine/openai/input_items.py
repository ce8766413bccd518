"""The input items of `/v1/responses`, and the messages of a chat they stand for. Pure.

A turn of the assistant is one message in a chat, and several items here: its reasoning, its text, its calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from engine import errors

Json: TypeAlias = dict[str, Any]

_STRICT = ConfigDict(strict=True, extra="forbid")
_PART_TYPES = ("input_text", "output_text", "refusal")
Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


def type_discriminator(usual: str | None = None) -> Discriminator:
    """Return what tells the members of a union apart: tags that are no identifiers, so that no path has them."""

    def tag(value: Any) -> str | None:
        found = (
            value.get("type", usual) if isinstance(value, dict) else getattr(value, "type", None)
        )
        return f"a {found}" if isinstance(found, str) else None

    return Discriminator(
        tag,
        custom_error_type="kind",
        custom_error_message="It must be an object of a type that is known",
    )


class InputText(BaseModel):
    """What was said to the model."""

    model_config = _STRICT

    type: Literal["input_text"]
    text: str


class OutputText(BaseModel):
    """What the model said; annotations there are none, and likelihoods are no part of a prompt."""

    model_config = _STRICT

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Json], Field(max_length=0)] = []
    logprobs: list[Json] = []


class RefusalText(BaseModel):
    """What the model said instead of an answer."""

    model_config = _STRICT

    type: Literal["refusal"]
    refusal: str


class ReasoningText(BaseModel):
    """What the model thought."""

    model_config = _STRICT

    type: Literal["reasoning_text"]
    text: str


Part: TypeAlias = Annotated[
    Annotated[InputText, Tag("a input_text")]
    | Annotated[OutputText, Tag("a output_text")]
    | Annotated[RefusalText, Tag("a refusal")],
    type_discriminator(),
]


class MessageItem(BaseModel):
    """One message."""

    model_config = _STRICT

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    id: str | None = None
    status: Status | None = None


class CallItem(BaseModel):
    """A call that the model made."""

    model_config = _STRICT

    type: Literal["function_call"]
    call_id: str
    name: Annotated[str, Field(min_length=1)]
    arguments: str
    id: str | None = None
    status: Status | None = None


class ResultItem(BaseModel):
    """What a call gave back."""

    model_config = _STRICT

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputText]
    id: str | None = None
    status: Status | None = None


class ReasoningItem(BaseModel):
    """What the model thought before the item that follows; only the text itself can be given back to it."""

    model_config = _STRICT

    type: Literal["reasoning"]
    content: list[ReasoningText]
    summary: Annotated[list[Json], Field(max_length=0)] = []
    id: str | None = None
    status: Status | None = None


Item: TypeAlias = Annotated[
    Annotated[MessageItem, Tag("a message")]
    | Annotated[CallItem, Tag("a function_call")]
    | Annotated[ResultItem, Tag("a function_call_output")]
    | Annotated[ReasoningItem, Tag("a reasoning")],
    type_discriminator("message"),
]
_ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")


def normalize(items: object) -> object:
    """Return items without what is null; refuse with a sentence what pydantic would report as a wrong type.

    Raises:
        RefusedError: an item or a part of one is of a type that this engine does not take.

    """
    if not isinstance(items, list):
        return items
    for at, item in enumerate(items):
        kind = item.get("type", "message") if isinstance(item, dict) else "message"
        if isinstance(kind, str) and kind not in _ITEM_TYPES:
            raise errors.invalid(
                f"Items of type '{kind[:50]}' are not supported; there are {', '.join(_ITEM_TYPES)}.",
                param=f"input[{at}].type",
            )
        if isinstance(item, dict):
            _check(item, f"input[{at}]")
    # Clients send back what they were given, with each field they know of.
    return [
        {name: value for name, value in item.items() if value is not None}
        if isinstance(item, dict)
        else item
        for item in items
    ]


def _check(item: Json, where: str) -> None:
    if item.get("encrypted_content") is not None:
        raise errors.invalid(
            "This engine encrypts nothing, so it cannot read that.",
            param=f"{where}.encrypted_content",
        )
    if item.get("type", "message") != "message":
        return
    content = item.get("content")
    for at, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in _PART_TYPES:
            raise errors.invalid(
                f"This model takes text only; a part of type '{kind[:50]}' is not supported.",
                param=f"{where}.content[{at}].type",
            )


@dataclass(slots=True)
class ItemOrigin:
    """Which items a message came from."""

    item: int | None
    """The index of the first; None: it is no item's."""
    calls: list[int] = field(default_factory=list)
    """The index of each of its calls."""


@dataclass(slots=True)
class ChatTranscript:
    """The messages so far, as a body of `/v1/chat/completions` has them."""

    messages: list[Json] = field(default_factory=list)
    origins: list[ItemOrigin] = field(default_factory=list)
    """One a message."""

    def add(self, message: Json, item: int | None) -> Json:
        """Add a message, which may still change."""
        self.messages.append(message)
        self.origins.append(ItemOrigin(item))
        return message


def to_chat(given: str | Sequence[Item], instructions: str | None) -> ChatTranscript:
    """Return the chat that a request's input stands for.

    Raises:
        RefusedError: a reasoning item is not followed by what it led to.

    """
    chat = ChatTranscript()
    if instructions is not None:
        chat.add({"role": "developer", "content": instructions}, None)
    if isinstance(given, str):
        chat.add({"role": "user", "content": given}, None)
        return chat
    turn: Json | None = None  # the assistant's, while its items come
    thought: str | None = None
    for at, item in enumerate(given):
        if isinstance(item, ReasoningItem):
            thought = (thought or "") + "".join(part.text for part in item.content)
            turn = None
            continue
        is_said = isinstance(item, CallItem) or (
            isinstance(item, MessageItem) and item.role == "assistant"
        )
        if thought is not None and not is_said:
            raise _dangling_reasoning(at - 1)
        if isinstance(item, CallItem):
            turn = turn or chat.add({"role": "assistant"}, at)
            turn.setdefault("tool_calls", []).append(_tool_call(item))
            chat.origins[-1].calls.append(at)
        elif isinstance(item, MessageItem):
            message = chat.add({"role": item.role, "content": _text(item.content)}, at)
            turn = message if is_said else None
        else:
            turn = None
            content = _text(item.output)
            chat.add({"role": "tool", "tool_call_id": item.call_id, "content": content}, at)
        if thought is not None and turn is not None:
            turn["reasoning_content"] = thought
            thought = None
    if thought is not None:
        raise _dangling_reasoning(len(given) - 1)
    return chat


def _dangling_reasoning(at: int) -> errors.RefusedError:
    return errors.invalid(
        "A reasoning item must be followed by the message or the function_call that it led to.",
        param=f"input[{at}]",
    )


def _tool_call(item: CallItem) -> Json:
    function = {"name": item.name, "arguments": item.arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _text(content: str | Sequence[InputText | OutputText | RefusalText]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, RefusalText) else part.text for part in content)
