"""Input items of `/v1/responses`, and their conversion to the messages of a chat. Pure.

An assistant's turn is one message in a chat. Here it is several items: its reasoning, its text and its calls. Clients
send back what any server answered, with its fields: unknown fields of items are ignored, and items of hosted tools and
compactions are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, Tag

from engine.openai import messages, parameters
from engine.openai.parameters import LenientModel
from engine.openai.response_tools import chat_name, freeform_arguments, type_discriminator
from engine.vision.image_reader import NO_IMAGES
from schemas.wire import errors

Json: TypeAlias = dict[str, Any]

_PART_TYPES = ("input_text", "output_text", "refusal", "input_image")


class InputText(LenientModel):
    """Text for the model."""

    type: Literal["input_text"]
    text: str


class InputImage(LenientModel):
    """An image, in the URL itself."""

    type: Literal["input_image"]
    image_url: Annotated[str, Field(min_length=1)]
    detail: Literal["auto", "low", "high", "original"] | None = None
    """OpenAI's price classes; the model's own preprocessing chooses the size."""


class OutputText(LenientModel):
    """Text of the model. Annotations and log probabilities are not part of a prompt."""

    type: Literal["output_text"]
    text: str


class RefusalText(LenientModel):
    """Refusal text of the model."""

    type: Literal["refusal"]
    refusal: str


class ReasoningText(LenientModel):
    """Reasoning of the model."""

    text: str = ""


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


class MessageItem(LenientModel):
    """One message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]


class CallItem(LenientModel):
    """A call by the model."""

    type: Literal["function_call"]
    call_id: str
    name: Annotated[str, Field(min_length=1)]
    namespace: str | None = None
    arguments: str


class FreeformCallItem(LenientModel):
    """A call of a freeform tool by the model."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: Annotated[str, Field(min_length=1)]
    namespace: str | None = None
    input: str


class ResultItem(LenientModel):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | list[ResultPart]


class ReasoningItem(LenientModel):
    """Reasoning that led to the next item. Encrypted reasoning cannot be read; a summary stands for a missing text."""

    type: Literal["reasoning"]
    content: list[ReasoningText] = Field(default=[])
    summary: list[ReasoningText] = Field(default=[])

    @property
    def text(self) -> str:
        """The reasoning; empty if there is none to read."""
        return "".join(part.text for part in self.content or self.summary)


class LeftOutItem(LenientModel):
    """The place of an item that is left out, so that the paths of the others stay right."""

    type: Literal["left_out"]


Item: TypeAlias = Annotated[
    Annotated[MessageItem, Tag("a message")]
    | Annotated[CallItem, Tag("a function_call")]
    | Annotated[FreeformCallItem, Tag("a custom_tool_call")]
    | Annotated[ResultItem, Tag("a function_call_output")]
    | Annotated[ResultItem, Tag("a custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("a reasoning")]
    | Annotated[LeftOutItem, Tag("a left_out")],
    type_discriminator("message"),
]
_ITEM_TYPES = (
    "message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "reasoning",
)  # fmt: skip
# Of hosted tools and of other servers' ways to shorten a context.
_LEFT_OUT_TYPES = frozenset(
    {
        "agent_message", "apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "compaction",
        "compaction_summary", "compaction_trigger", "computer_call", "computer_call_output", "context_compaction",
        "file_search_call", "ghost_snapshot", "image_generation_call", "local_shell_call", "local_shell_call_output",
        "mcp_approval_request", "mcp_approval_response", "mcp_call", "mcp_list_tools", "shell_call",
        "shell_call_output", "tool_search_call", "tool_search_output", "web_search_call",
    }
)  # fmt: skip


def normalize(items: object, *, sees_images: bool = False) -> list[str]:
    """Replace the items to leave out; return the names by which the client is told.

    Raises:
        RefusedError: there are too many items, or the type of an item or of a part is not supported.

    """
    left_out: dict[str, None] = {}
    if not isinstance(items, list):
        return []
    parameters.check_count(items, messages.MAX_MESSAGES, "input")
    for at, item in enumerate(items):
        if not isinstance(item, dict):
            continue
        kind = item.get("type", "message")
        if isinstance(kind, str) and kind in _LEFT_OUT_TYPES:
            left_out[f"input.{kind}"] = None
            items[at] = {"type": "left_out"}
            continue
        if isinstance(kind, str) and kind not in _ITEM_TYPES:
            hint = (
                " Send the item itself, or 'previous_response_id'."
                if kind == "item_reference"
                else ""
            )
            raise errors.invalid(
                f"Items of type '{kind[:50]}' are not supported; use {', '.join(_ITEM_TYPES)}.{hint}",
                param=f"input[{at}].type",
            )
        if item.get("encrypted_content"):
            left_out["input.encrypted_content"] = None
        content = item.get("content") if kind == "message" else None
        for index, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict):
                _check_part(part, f"input[{at}].content[{index}]", sees_images=sees_images)
        output = item.get("output")
        for index, part in enumerate(output if isinstance(output, list) else ()):
            if isinstance(part, dict):
                # A text model gets a note instead (messages.py).
                _check_part(part, f"input[{at}].output[{index}]", sees_images=True)
    return list(left_out)


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

    Reasoning that no message or call of the assistant follows is left out: its answer was interrupted.
    """
    chat = ChatTranscript()
    if instructions is not None:
        chat.add({"role": "developer", "content": instructions}, None)
    if isinstance(request_input, str):
        chat.add({"role": "user", "content": request_input}, None)
        return chat
    turn: Json | None = None  # the assistant's message, while its items follow each other
    reasoning: list[str] = []
    for at, item in enumerate(request_input):
        if isinstance(item, LeftOutItem):
            continue
        if isinstance(item, ReasoningItem):
            reasoning.append(item.text)
            turn = None
            continue
        if isinstance(item, CallItem | FreeformCallItem):
            turn = turn or chat.add({"role": "assistant"}, at)
            turn.setdefault("tool_calls", []).append(_tool_call(item))
            chat.origins[-1].calls.append(at)
        elif isinstance(item, MessageItem):
            message = chat.add({"role": item.role, "content": _content(item.content)}, at)
            turn = message if item.role == "assistant" else None
        else:
            turn = None
            content = _content(item.output)
            chat.add({"role": "tool", "tool_call_id": item.call_id, "content": content}, at)
            chat.origins[-1].content = "output"
        if any(reasoning) and turn is not None:
            turn["reasoning_content"] = "".join(reasoning)
        reasoning = []
    return chat


def _tool_call(item: CallItem | FreeformCallItem) -> Json:
    arguments = item.arguments if isinstance(item, CallItem) else freeform_arguments(item.input)
    function = {"name": chat_name(item.name, item.namespace), "arguments": arguments}
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
