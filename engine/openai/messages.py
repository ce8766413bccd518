"""Messages of a chat: from OpenAI's form to the form that chat templates take.

OpenAI's clients send the arguments of a call as JSON in a string, and a result with the id of its call. Templates on
Hugging Face take the arguments as an object, and a result with the name of its function. Clients send back what any
server answered: fields of messages that are not OpenAI's are ignored.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import orjson
from pydantic import Field, field_validator

from engine.openai import parameters
from engine.openai.parameters import LenientModel
from engine.text.interface import Message
from engine.vision.image_reader import NO_IMAGES
from schemas.wire import errors

# Parts in which other servers answer with reasoning; templates take none in the text.
_REASONING_PARTS = frozenset({"reasoning", "redacted_thinking", "thinking"})
_NO_IMAGE_NOTE = "[An image was left out here: this model reads text only.]"
# More than a context of a million tokens has in practice: rendering this many takes 50 ms.
MAX_MESSAGES = 4096
# The work of rendering a message, in characters of text that take as long to tokenize.
_MESSAGE_CHARACTERS = 16
ROLES = ("system", "developer", "user", "assistant", "tool")
MEDIA = ("image_url", "video_url", "input_audio")
"""Types of parts that only some models take."""
TAGS = (*ROLES, "text", *MEDIA)
"""Names in pydantic's paths that are no fields."""
Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=256)]


class TextPart(LenientModel):
    """Text of a message."""

    type: Literal["text"]
    text: str


class ImageUrl(LenientModel):
    """An image, in the URL itself."""

    url: Annotated[str, Field(min_length=1)]
    detail: Literal["auto", "low", "high"] | None = None
    """OpenAI's price classes; the model's own preprocessing chooses the size."""


class MediaUrl(LenientModel):
    """A video, in the URL itself."""

    url: Annotated[str, Field(min_length=1)]


class ImagePart(LenientModel):
    """Image of a message."""

    type: Literal["image_url"]
    image_url: ImageUrl

    @field_validator("image_url", mode="before", json_schema_input_type=ImageUrl | str)
    @classmethod
    def _from_text(cls, value: object) -> object:
        return {"url": value} if isinstance(value, str) else value


class VideoPart(LenientModel):
    """Frames of a video, as vLLM takes them."""

    type: Literal["video_url"]
    video_url: MediaUrl


class AudioData(LenientModel):
    """A recording in base64."""

    data: Annotated[str, Field(min_length=1)]
    format: Annotated[str, Field(min_length=1, max_length=20)]


class AudioPart(LenientModel):
    """Recording of a message."""

    type: Literal["input_audio"]
    input_audio: AudioData


class RefusalPart(LenientModel):
    """Refusal text of an assistant."""

    type: Literal["refusal"]
    refusal: str


PromptPart: TypeAlias = Annotated[
    TextPart | ImagePart | VideoPart | AudioPart, Field(discriminator="type")
]


class PromptMessage(LenientModel):
    """Message of a system, a developer or a user."""

    role: Literal["system", "developer", "user"]
    content: str | list[PromptPart]
    name: Name | None = None


class MessageFunction(LenientModel):
    """Function and arguments of a call."""

    name: Annotated[str, Field(min_length=1)]
    arguments: str


class MessageToolCall(LenientModel):
    """One tool call of an assistant."""

    id: str
    type: Literal["function"] = "function"
    function: MessageFunction
    index: int | None = None
    """Of a streamed call; clients that join the pieces leave it there."""


class AssistantMessage(LenientModel):
    """Earlier message of the assistant."""

    role: Literal["assistant"]
    content: str | list[TextPart | RefusalPart] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    name: Name | None = None


class ToolMessage(LenientModel):
    """Result of a tool call."""

    role: Literal["tool"]
    tool_call_id: str
    content: str | list[PromptPart]
    name: str | None = None
    """The name of the function, which the call has as well."""


AnyMessage: TypeAlias = Annotated[
    PromptMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


def normalize(messages: object, *, sees_images: bool = False) -> list[str]:
    """Make messages of all servers alike, and refuse unsupported roles and parts with a clearer message than pydantic's.

    An image in a tool's result, which the user did not choose, becomes a note if the model reads text only. Return the
    names of what was left out.

    Raises:
        RefusedError: there are too many messages, or one has a role or a part that is not supported.

    """
    parameters.check_count(messages, MAX_MESSAGES, "messages")
    left_out: dict[str, None] = {}
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, dict):
            continue
        where, role = f"messages[{index}]", message.get("role")
        _check_role(role, where)
        if message.get("function_call"):
            raise errors.invalid(
                "'function_call' is deprecated; send the call in 'tool_calls'.",
                param=f"{where}.function_call",
            )
        content = message.get("content")
        if content is None and role in ("assistant", "tool"):
            message["content"] = ""
        if not isinstance(content, list):
            continue
        if role == "assistant":
            message["content"] = content = [part for part in content if not _is_reasoning(part)]
        for at, part in enumerate(content):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "image_url" and role == "tool" and not sees_images:
                content[at] = {"type": "text", "text": _NO_IMAGE_NOTE}
                left_out["messages.image_url"] = None
            else:
                _check_part(kind, f"{where}.content[{at}]", sees_images=sees_images)
    return list(left_out)


def _is_reasoning(part: object) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    return isinstance(kind, str) and kind in _REASONING_PARTS


def _check_role(role: object, where: str) -> None:
    if role == "function":
        raise errors.invalid(
            "The role 'function' is deprecated; use the role 'tool'.",
            param=f"{where}.role",
        )
    if role not in ROLES:
        raise errors.invalid(
            f"Invalid '{where}.role': it must be one of {', '.join(ROLES)}.", param=f"{where}.role"
        )


def _check_part(kind: object, where: str, *, sees_images: bool) -> None:
    if kind == "image_url" and not sees_images:
        raise errors.invalid(NO_IMAGES, param=f"{where}.type")
    if kind in MEDIA and sees_images:
        return
    if isinstance(kind, str) and kind not in ("text", "refusal"):
        taken = f"text and {', '.join(MEDIA)}" if sees_images else "text only"
        raise errors.invalid(
            f"This model accepts {taken}; a part of type '{kind[:50]}' is not supported.",
            param=f"{where}.type",
        )


def to_template(messages: Sequence[AnyMessage]) -> tuple[Message, ...]:
    """Return the messages in the form that chat templates take.

    Raises:
        RefusedError: a result has no call.

    """
    functions: dict[str, str] = {}  # names of called functions, by the id of the call
    converted: list[Message] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if isinstance(message, PromptMessage):
            converted.append(_prompt_message(message, where))
        elif isinstance(message, AssistantMessage):
            converted.append(_assistant_message(message))
            functions |= {call.id: call.function.name for call in message.tool_calls or ()}
        else:
            converted.append(_tool_message(message, functions, where))
    return tuple(converted)


def _prompt_message(message: PromptMessage, where: str) -> Message:
    # Templates know `system`; `developer` is OpenAI's name for it since its reasoning models.
    role = "system" if message.role == "developer" else message.role
    named = {} if message.name is None else {"name": message.name}
    return {"role": role, "content": _content(message.content, where), **named}


def _assistant_message(message: AssistantMessage) -> Message:
    converted: Message = {
        "role": "assistant",
        "content": _text(message.content or "") + (message.refusal or ""),
    }
    if message.name is not None:
        converted["name"] = message.name
    if message.reasoning_content:
        converted["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        converted["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return converted


def _tool_call(call: MessageToolCall) -> Message:
    """Return a call for the template. An answer may have been cut in its arguments: then they are given as text."""
    try:
        arguments = orjson.loads(call.function.arguments or "{}")
    except orjson.JSONDecodeError:
        arguments = None
    if not isinstance(arguments, dict):
        arguments = {"arguments": call.function.arguments}
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _tool_message(message: ToolMessage, functions: Mapping[str, str], where: str) -> Message:
    name = functions.get(message.tool_call_id)
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
        "content": _content(message.content, where),
    }


def _text(content: str | Sequence[TextPart | RefusalPart]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)


def _content(
    content: str | Sequence[TextPart | ImagePart | VideoPart | AudioPart], where: str
) -> str | list[dict[str, Any]]:
    """Return a text, or parts if there are images: templates write a marker for each image, video and recording."""
    if isinstance(content, str):
        return content
    texts = [part for part in content if isinstance(part, TextPart)]
    if len(texts) == len(content):
        return _text(texts)
    return [_part(part, f"{where}.content[{at}]") for at, part in enumerate(content)]


def _part(part: TextPart | ImagePart | VideoPart | AudioPart, where: str) -> dict[str, Any]:
    match part:
        case TextPart(text=text):
            return {"type": "text", "text": text}
        case ImagePart(image_url=image):
            return {"type": "image", "url": image.url, "param": f"{where}.image_url.url"}
        case VideoPart(video_url=video):
            return {"type": "video", "url": video.url, "param": f"{where}.video_url.url"}
        case AudioPart(input_audio=audio):
            url = f"data:audio/{audio.format};base64,{audio.data}"
            return {"type": "audio", "url": url, "param": f"{where}.input_audio.data"}


def with_spoken_names(messages: Sequence[Message], role: str) -> list[Message]:
    """Return the messages with the names of a role in front of their text, as in `Bob: Hello`."""
    return [
        _with_spoken_name(message) if message["role"] == role and "name" in message else message
        for message in messages
    ]


def _with_spoken_name(message: Message) -> Message:
    spoken = {key: value for key, value in message.items() if key != "name"}
    content = message["content"]
    if isinstance(content, list):
        spoken["content"] = [{"type": "text", "text": f"{message['name']}: "}, *content]
    elif content:
        spoken["content"] = f"{message['name']}: {content}"
    return spoken


def text_length(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the approximate work of rendering and tokenizing these messages, in characters of text."""
    return sum(
        _MESSAGE_CHARACTERS
        + _content_length(message["content"])
        + len(message.get("reasoning_content", ""))
        + sum(len(str(call)) for call in message.get("tool_calls", ()))
        for message in messages
    )


def _content_length(content: str | Sequence[Mapping[str, Any]]) -> int:
    if isinstance(content, str):
        return len(content)
    return sum(len(part.get("text", "")) + len(part.get("url", "")) for part in content)
