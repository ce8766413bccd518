"""Input items of `/v1/responses`, and their conversion to the messages of a chat. Pure.

An assistant's turn is one message in a chat. Here it is several items: its reasoning, its text and its calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from engine.openai import messages, parameters
from engine.vision.image_reader import NO_IMAGES
from schemas.wire import errors

Json: TypeAlias = dict[str, Any]

_STRICT = ConfigDict(strict=True, extra="forbid")
_PART_TYPES = ("input_text", "output_text", "refusal", "input_image")
Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


def type_discriminator(default: str | None = None) -> Discriminator:
    """Return a discriminator by the field `type`.

    Its tags are not identifiers, so that `_error_path` leaves them out of paths.
    """

    def tag(value: Any) -> str | None:
        kind = (
            value.get("type", default) if isinstance(value, dict) else getattr(value, "type", None)
        )
        return f"a {kind}" if isinstance(kind, str) else None

    return Discriminator(
        tag,
        custom_error_type="kind",
        custom_error_message="It must be an object of a known type",
    )


class InputText(BaseModel):
    """Text for the model."""

    model_config = _STRICT

    type: Literal["input_text"]
    text: str


class InputImage(BaseModel):
    """An image, in the URL itself."""

    model_config = _STRICT

    type: Literal["input_image"]
    image_url: Annotated[str, Field(min_length=1)]
    detail: Literal["auto", "low", "high", "original"] | None = None
    """OpenAI's price classes; the model's own preprocessing chooses the size."""
    file_id: None = None


class OutputText(BaseModel):
    """Text of the model. There are no annotations, and log probabilities are not part of a prompt."""

    model_config = _STRICT

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Json], Field(max_length=0)] = []
    logprobs: list[Json] = []


class RefusalText(BaseModel):
    """Refusal text of the model."""

    model_config = _STRICT

    type: Literal["refusal"]
    refusal: str


class ReasoningText(BaseModel):
    """Reasoning of the model."""

    model_config = _STRICT

    type: Literal["reasoning_text"]
    text: str


Part: TypeAlias = Annotated[
    Annotated[InputText, Tag("a input_text")]
    | Annotated[InputImage, Tag("a input_image")]
    | Annotated[OutputText, Tag("a output_text")]
    | Annotated[RefusalText, Tag("a refusal")],
    type_discriminator(),
]
ResultPart: TypeAlias = Annotated[
    Annotated[InputText, Tag("a input_text")] | Annotated[InputImage, Tag("a input_image")],
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
    """A call by the model."""

    model_config = _STRICT

    type: Literal["function_call"]
    call_id: str
    name: Annotated[str, Field(min_length=1)]
    arguments: str
    id: str | None = None
    status: Status | None = None


class ResultItem(BaseModel):
    """The result of a call."""

    model_config = _STRICT

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[ResultPart]
    id: str | None = None
    status: Status | None = None


class ReasoningItem(BaseModel):
    """Reasoning that led to the next item. Only plain text is supported, neither encrypted nor summarized."""

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
# The field of an item that holds its text and images.
_CONTENT_FIELDS = {"message": "content", "function_call_output": "output"}


def normalize(items: object, *, sees_images: bool = False) -> object:
    """Return items without null fields; refuse unsupported types with a clearer message than pydantic's.

    Raises:
        RefusedError: there are too many items, or the type of an item or of a part is not supported.

    """
    if not isinstance(items, list):
        return items
    parameters.check_count(items, messages.MAX_MESSAGES, "input")
    for at, item in enumerate(items):
        kind = item.get("type", "message") if isinstance(item, dict) else "message"
        if isinstance(kind, str) and kind not in _ITEM_TYPES:
            raise errors.invalid(
                f"Items of type '{kind[:50]}' are not supported; use {', '.join(_ITEM_TYPES)}.",
                param=f"input[{at}].type",
            )
        if isinstance(item, dict):
            _check(item, f"input[{at}]", sees_images=sees_images)
    # Clients send back earlier output with all fields that they know, null where unset.
    return [
        {name: value for name, value in item.items() if value is not None}
        if isinstance(item, dict)
        else item
        for item in items
    ]


def _check(item: Json, where: str, *, sees_images: bool) -> None:
    if item.get("encrypted_content") is not None:
        raise errors.invalid(
            "This engine does not encrypt reasoning; leave 'encrypted_content' out.",
            param=f"{where}.encrypted_content",
        )
    name = _CONTENT_FIELDS.get(str(item.get("type", "message")), "")
    content = item.get(name)
    for at, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, dict):
            _check_part(part, f"{where}.{name}[{at}]", sees_images=sees_images)


def _check_part(part: Json, where: str, *, sees_images: bool) -> None:
    kind = part.get("type")
    if kind == "input_image":
        if not sees_images:
            raise errors.invalid(NO_IMAGES, param=f"{where}.type")
        if part.get("file_id") is not None or part.get("image_url") is None:
            raise errors.invalid(
                "This engine does not store files; send the image itself in 'image_url', as "
                "data:image/png;base64,...",
                param=f"{where}.{'image_url' if part.get('file_id') is None else 'file_id'}",
            )
    elif isinstance(kind, str) and kind not in _PART_TYPES:
        taken = "text and images ('input_image')" if sees_images else "text only"
        raise errors.invalid(
            f"This model accepts {taken}; a part of type '{kind[:50]}' is not supported.",
            param=f"{where}.type",
        )


@dataclass(slots=True)
class ItemOrigin:
    """The items that became one message."""

    item: int | None
    """Index of the first item; None if the message came from no item."""
    calls: list[int] = field(default_factory=list)
    """Indexes of its calls."""
    content: str = "content"
    """The field of the item that is the message's content."""


@dataclass(slots=True)
class ChatTranscript:
    """Messages in the form of `/v1/chat/completions`, each with its origin."""

    messages: list[Json] = field(default_factory=list)
    origins: list[ItemOrigin] = field(default_factory=list)
    """One for each message."""

    def add(self, message: Json, item: int | None) -> Json:
        """Append a message and return it; it may still change."""
        self.messages.append(message)
        self.origins.append(ItemOrigin(item))
        return message


def to_chat(request_input: str | Sequence[Item], instructions: str | None) -> ChatTranscript:
    """Return the equivalent chat of a request's input.

    Raises:
        RefusedError: a reasoning item is not followed by a message or a call of the assistant.

    """
    chat = ChatTranscript()
    if instructions is not None:
        chat.add({"role": "developer", "content": instructions}, None)
    if isinstance(request_input, str):
        chat.add({"role": "user", "content": request_input}, None)
        return chat
    turn: Json | None = None  # the assistant's message, while its items follow each other
    reasoning: str | None = None
    for at, item in enumerate(request_input):
        if isinstance(item, ReasoningItem):
            reasoning = (reasoning or "") + "".join(part.text for part in item.content)
            turn = None
            continue
        is_assistant = isinstance(item, CallItem) or (
            isinstance(item, MessageItem) and item.role == "assistant"
        )
        if reasoning is not None and not is_assistant:
            raise _dangling_reasoning(at - 1)
        if isinstance(item, CallItem):
            turn = turn or chat.add({"role": "assistant"}, at)
            turn.setdefault("tool_calls", []).append(_tool_call(item))
            chat.origins[-1].calls.append(at)
        elif isinstance(item, MessageItem):
            message = chat.add({"role": item.role, "content": _content(item.content)}, at)
            turn = message if is_assistant else None
        else:
            turn = None
            content = _content(item.output)
            chat.add({"role": "tool", "tool_call_id": item.call_id, "content": content}, at)
            chat.origins[-1].content = "output"
        if reasoning is not None and turn is not None:
            turn["reasoning_content"] = reasoning
            reasoning = None
    if reasoning is not None:
        raise _dangling_reasoning(len(request_input) - 1)
    return chat


def _dangling_reasoning(at: int) -> errors.RefusedError:
    return errors.invalid(
        "A reasoning item must be followed by the message or the function_call that it led to.",
        param=f"input[{at}]",
    )


def _tool_call(item: CallItem) -> Json:
    function = {"name": item.name, "arguments": item.arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _content(
    content: str | Sequence[InputText | InputImage | OutputText | RefusalText],
) -> str | list[Json]:
    """Return a text, or a chat's parts if there are images."""
    if isinstance(content, str):
        return content
    if any(isinstance(part, InputImage) for part in content):
        return [_chat_part(part) for part in content]
    return "".join(_chat_part(part)["text"] for part in content)


def _chat_part(part: InputText | InputImage | OutputText | RefusalText) -> Json:
    if isinstance(part, InputImage):
        return {"type": "image_url", "image_url": {"url": part.image_url}}
    return {
        "type": "text",
        "text": part.refusal if isinstance(part, RefusalText) else part.text,
    }
