"""Ollama's requests as OpenAI's. Pure: bytes in, the engine's body out."""

from typing import Any, Literal

import msgspec

from gateway.errors import invalid
from gateway.surfaces.asking import decode, without_nones
from gateway.surfaces.ollama import options
from gateway.surfaces.ollama.messages import NO_IMAGES, Message, translate

_EFFORTS: dict[object, str] = {
    True: "medium",
    False: "none",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "max": "high",
}


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None
    truncate: bool | None = None


class _Generation(_Body):
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    shift: bool | None = None


class ChatBody(_Generation):
    """What `/api/chat` takes."""

    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None


class GenerateBody(_Generation):
    """What `/api/generate` takes."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[int] | None = None
    raw: bool | None = None
    images: list[Any] | None = None
    width: int | None = None
    height: int | None = None
    steps: int | None = None


class EmbedBody(_Body):
    """What `/api/embed` takes."""

    input: str | list[str] = ""
    dimensions: int | None = None


class EmbeddingsBody(_Body):
    """What `/api/embeddings`, the older of the two, takes."""

    prompt: str = ""


_CHAT = msgspec.json.Decoder(ChatBody)
_GENERATE = msgspec.json.Decoder(GenerateBody)
_EMBED = msgspec.json.Decoder(EmbedBody)
_EMBEDDINGS = msgspec.json.Decoder(EmbeddingsBody)

# What is a field of its own elsewhere, or is called otherwise there.
_OPTIONS = {name: f"options.{name}" for name in options.MAPPED.keys() | options.NO_EFFECT}
_OPTIONS |= {name: f"options.{own}" for name, own in options.MEANT.items()}
_MEANT = _OPTIONS | {"response_format": "format", "reasoning_effort": "think", "thinking": "think"}

# Of generate, what an engine has nothing for; each with what to do instead.
_REFUSED = {
    "suffix": "This fleet continues texts and does not fill gaps; leave 'suffix' out.",
    "template": "The model's own chat template is used; leave 'template' out, or send the finished text with "
    "'raw': true.",
    "context": "This gateway keeps no conversations as tokens; send the messages so far to /api/chat.",
    "images": NO_IMAGES,
    "width": "The models of this fleet make text, no images; leave 'width' out.",
    "height": "The models of this fleet make text, no images; leave 'height' out.",
    "steps": "The models of this fleet make text, no images; leave 'steps' out.",
}


def read_chat(body: bytes) -> ChatBody:
    """Return the body of a chat.

    Raises:
        RefusedError: it is none.

    """
    return decode(_CHAT, ChatBody, body, _MEANT)


def read_generate(body: bytes) -> GenerateBody:
    """Return the body of a generation.

    Raises:
        RefusedError: it is none, or asks for what is not done.

    """
    asked = decode(_GENERATE, GenerateBody, body, _MEANT)
    for name, why in _REFUSED.items():
        if getattr(asked, name):
            raise invalid(why, param=name)
    return asked


def read_embed(body: bytes) -> EmbedBody:
    """Return the body of a request for embeddings.

    Raises:
        RefusedError: it is none.

    """
    return decode(_EMBED, EmbedBody, body, _OPTIONS)


def read_embeddings(body: bytes) -> EmbeddingsBody:
    """Return the body of a request for one embedding.

    Raises:
        RefusedError: it is none.

    """
    return decode(_EMBEDDINGS, EmbeddingsBody, body, _OPTIONS)


def chat(asked: ChatBody) -> dict[str, Any]:
    """Return the chat as OpenAI's.

    Raises:
        RefusedError: something in it has no like there.

    """
    tools = [{"type": "function", **tool} for tool in asked.tools or ()]
    return {
        **_generation(asked),
        "messages": translate(asked.messages or ()),
        **({"tools": tools} if tools else {}),
    }


def generate(asked: GenerateBody) -> dict[str, Any]:
    """Return the prompt as a chat of OpenAI's, or with `raw` as a text to be continued.

    Raises:
        RefusedError: something in it has no like there.

    """
    body = _generation(asked)
    prompt = asked.prompt or ""
    if not asked.raw:
        system = [{"role": "system", "content": asked.system}] if asked.system else []
        return {**body, "messages": [*system, {"role": "user", "content": prompt}]}
    for name in ("system", "format", "think", "logprobs"):
        if getattr(asked, name):
            raise invalid(f"'{name}' is for chats; leave it out, or 'raw'.", param=name)
    body.pop("reasoning_effort", None)
    return {**body, "prompt": prompt}


def embed(asked: EmbedBody) -> dict[str, Any]:
    """Return the texts as OpenAI's request for their embeddings."""
    return {
        "model": asked.model,
        "input": asked.input,
        **without_nones(dimensions=asked.dimensions),
    }


def embeddings(asked: EmbeddingsBody) -> dict[str, Any]:
    """Return the text as OpenAI's request for its embedding."""
    return {"model": asked.model, "input": asked.prompt}


def _generation(asked: _Generation) -> dict[str, Any]:
    is_streamed = asked.stream is not False
    body: dict[str, Any] = {
        "model": asked.model,
        **options.translate(asked.options or {}),
        "fit_max_tokens": True,
        "include_performance": True,
        "stream": is_streamed,
    }
    if is_streamed:
        body["stream_options"] = {"include_usage": True}
    if asked.think is not None:
        body["reasoning_effort"] = _effort(asked.think)
    if asked.format:
        body["response_format"] = _format(asked.format)
    if asked.logprobs:
        body |= without_nones(logprobs=True, top_logprobs=asked.top_logprobs)
    return body


def _effort(think: object) -> str:
    found = _EFFORTS.get(think)
    if found is None:
        known = 'true, false, "low", "medium", "high" or "max"'
        raise invalid(f"'think' must be {known}; it is {str(think)[:50]!r}.", param="think")
    return found


def _format(given: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(given, str):
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given}}
