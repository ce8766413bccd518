"""Translates Ollama's requests to OpenAI's: bodies, options and messages. Pure; the engine validates the values."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import msgspec
import orjson

from gateway.apis.adapter import decode, unknown_name, without_nones
from schemas.wire.errors import RefusedError, invalid

MAPPED: Mapping[str, str] = MappingProxyType(
    {
        "frequency_penalty": "frequency_penalty",
        "min_p": "min_p",
        "num_predict": "max_tokens",
        "presence_penalty": "presence_penalty",
        "repeat_penalty": "repetition_penalty",
        "seed": "seed",
        "stop": "stop",
        "temperature": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
    }
)
"""The engine's parameter by Ollama's option."""

MEANT: Mapping[str, str] = MappingProxyType(
    {"max_completion_tokens": "num_predict"}
    | {name: own for own, name in MAPPED.items() if name != own}
)
"""Ollama's option by other APIs' names."""

# Options that the deployment decides, options of llama.cpp, and samplers that the engine lacks.
# Clients send them with default values, so they are ignored and not refused.
NO_EFFECT = frozenset(
    {
        "embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "mirostat", "mirostat_eta",
        "mirostat_tau", "num_batch", "num_ctx", "num_gpu", "num_gqa", "num_keep", "num_thread", "numa",
        "penalize_newline", "repeat_last_n", "rope_frequency_base", "rope_frequency_scale", "tfs_z",
        "typical_p", "use_mlock", "use_mmap", "vocab_only",
    }
)  # fmt: skip

# Options whose negative values mean no limit or a random seed.
_AS_IT_COMES = frozenset({"num_predict", "seed"})
NO_IMAGES = (
    "The models of this fleet read text only; leave 'images' out, or describe them in the text."
)
_EFFORTS: dict[object, str] = {
    True: "medium",
    False: "none",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "max": "high",
}
# Options that other APIs have as fields, or under another name.
_OPTIONS = {name: f"options.{name}" for name in MAPPED.keys() | NO_EFFECT} | {
    name: f"options.{own}" for name, own in MEANT.items()
}
_RENAMED_FIELDS = _OPTIONS | {
    "response_format": "format",
    "reasoning_effort": "think",
    "thinking": "think",
}
# Unsupported fields of `/api/generate`, each with advice.
_UNSUPPORTED = {
    "suffix": "This fleet continues texts and does not fill gaps; leave 'suffix' out.",
    "template": "The model's own chat template is used; leave 'template' out, or send the finished text with "
    "'raw': true.",
    "context": "This gateway keeps no conversations as tokens; send the messages so far to /api/chat.",
    "images": NO_IMAGES,
    "width": "The models of this fleet make text, no images; leave 'width' out.",
    "height": "The models of this fleet make text, no images; leave 'height' out.",
    "steps": "The models of this fleet make text, no images; leave 'steps' out.",
}


def translate_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's parameters.

    Raises:
        RefusedError: an option is unknown.

    """
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name in NO_EFFECT or value is None:
            continue
        known = MAPPED.get(name)
        if known is None:
            message = unknown_name("option", name, MAPPED.keys() | NO_EFFECT, MEANT)
            raise invalid(message, param=f"options.{name[:100]}")
        number = int(value) if isinstance(value, float) and value.is_integer() else value
        if name in _AS_IT_COMES and isinstance(number, int) and number < (name == "num_predict"):
            continue
        if name != "stop" or value:
            found[known] = number
    return found


class OllamaFunction(msgspec.Struct, forbid_unknown_fields=True):
    """The function of a call."""

    name: str
    arguments: dict[str, Any] | str | None = None
    index: int | None = None
    description: str | None = None


class OllamaToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """A tool call of an earlier turn."""

    function: OllamaFunction
    id: str | None = None
    type: str | None = None


class OllamaMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


def translate_messages(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Return the messages in OpenAI's format; calls get the ids that Ollama's lack.

    Raises:
        RefusedError: a message has images, or a result answers no call.

    """
    waiting: list[tuple[str, str]] = []  # ids and names of calls without a result
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


def _call(call: OllamaToolCall, id_: str) -> dict[str, Any]:
    given = call.function.arguments
    arguments = given if isinstance(given, str) else orjson.dumps(given or {}).decode()
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id or id_, "type": "function", "function": function}


def _answered(message: OllamaMessage, waiting: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
    """Return the call that a result belongs to: by its id, else its name, else its position."""
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
    """Body of `/api/chat`."""

    messages: list[OllamaMessage] | None = None
    tools: list[dict[str, Any]] | None = None


class GenerateBody(_Generation):
    """Body of `/api/generate`."""

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
    """Body of `/api/embed`."""

    input: str | list[str] = ""
    dimensions: int | None = None


class EmbeddingsBody(_Body):
    """Body of `/api/embeddings`, the older form."""

    prompt: str = ""


_CHAT = msgspec.json.Decoder(ChatBody)
_GENERATE = msgspec.json.Decoder(GenerateBody)
_EMBED = msgspec.json.Decoder(EmbedBody)
_EMBEDDINGS = msgspec.json.Decoder(EmbeddingsBody)


def read_chat(body: bytes) -> ChatBody:
    """Return the decoded body of a chat request.

    Raises:
        RefusedError: the body is invalid.

    """
    return decode(_CHAT, ChatBody, body, _RENAMED_FIELDS)


def read_generate(body: bytes) -> GenerateBody:
    """Return the decoded body of a generate request.

    Raises:
        RefusedError: the body is invalid or has an unsupported field.

    """
    body_fields = decode(_GENERATE, GenerateBody, body, _RENAMED_FIELDS)
    for name, why in _UNSUPPORTED.items():
        if getattr(body_fields, name):
            raise invalid(why, param=name)
    return body_fields


def read_embed(body: bytes) -> EmbedBody:
    """Return the decoded body of an embed request.

    Raises:
        RefusedError: the body is invalid.

    """
    return decode(_EMBED, EmbedBody, body, _OPTIONS)


def read_embeddings(body: bytes) -> EmbeddingsBody:
    """Return the decoded body of an embeddings request.

    Raises:
        RefusedError: the body is invalid.

    """
    return decode(_EMBEDDINGS, EmbeddingsBody, body, _OPTIONS)


def chat_to_openai(body_fields: ChatBody) -> dict[str, Any]:
    """Return the request as an OpenAI chat request.

    Raises:
        RefusedError: a field has no equivalent.

    """
    tools = [{"type": "function", **tool} for tool in body_fields.tools or ()]
    return {
        **_generation(body_fields),
        "messages": translate_messages(body_fields.messages or ()),
        **({"tools": tools} if tools else {}),
    }


def generate_to_openai(body_fields: GenerateBody) -> dict[str, Any]:
    """Return the prompt as an OpenAI chat request, or with `raw` as a completion request.

    Raises:
        RefusedError: a field has no equivalent.

    """
    body = _generation(body_fields)
    prompt = body_fields.prompt or ""
    if not body_fields.raw:
        system = [{"role": "system", "content": body_fields.system}] if body_fields.system else []
        return {**body, "messages": [*system, {"role": "user", "content": prompt}]}
    for name in ("system", "format", "think", "logprobs"):
        if getattr(body_fields, name):
            raise invalid(f"'{name}' is for chats; leave it out, or 'raw'.", param=name)
    body.pop("reasoning_effort", None)
    return {**body, "prompt": prompt}


def embed_to_openai(body_fields: EmbedBody) -> dict[str, Any]:
    """Return the request as an OpenAI embeddings request."""
    return {
        "model": body_fields.model,
        "input": body_fields.input,
        **without_nones(dimensions=body_fields.dimensions),
    }


def embeddings_to_openai(body_fields: EmbeddingsBody) -> dict[str, Any]:
    """Return the request as an OpenAI embeddings request."""
    return {"model": body_fields.model, "input": body_fields.prompt}


def _generation(body_fields: _Generation) -> dict[str, Any]:
    is_streamed = body_fields.stream is not False
    body: dict[str, Any] = {
        "model": body_fields.model,
        **translate_options(body_fields.options or {}),
        "fit_max_tokens": True,
        "include_performance": True,
        "stream": is_streamed,
    }
    if is_streamed:
        body["stream_options"] = {"include_usage": True}
    if body_fields.think is not None:
        body["reasoning_effort"] = _effort(body_fields.think)
    if body_fields.format:
        body["response_format"] = _format(body_fields.format)
    if body_fields.logprobs:
        body |= without_nones(logprobs=True, top_logprobs=body_fields.top_logprobs)
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
