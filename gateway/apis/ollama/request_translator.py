"""Translates Ollama's requests to OpenAI's: bodies, options and messages. Pure; the engine validates the values."""

import math
import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal

import msgspec
import orjson

from gateway.apis.adapter import check_messages, decode, unknown_name, without_nones
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

# Options about memory and hardware, which the deployment or the engine decides: they do not change the answer.
# Clients send them with default values, so they are ignored and not refused.
NO_EFFECT = frozenset(
    {
        "f16_kv", "logits_all", "low_vram", "main_gpu", "mirostat_eta", "mirostat_tau", "num_batch", "num_gpu",
        "num_gqa", "num_keep", "num_thread", "numa", "use_mlock", "use_mmap",
    }
)  # fmt: skip

NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "embedding_only": (False,),
        "mirostat": (0,),
        # Ollama's default is a window of 64; here penalties consider all of the prompt and the answer.
        "penalize_newline": (True,),
        "repeat_last_n": (-1, 64),
        "rope_frequency_base": (0,),
        "rope_frequency_scale": (0, 1),
        "tfs_z": (0, 1),
        "typical_p": (0, 1),
        "vocab_only": (False,),
    }
)
"""Options that the engine lacks: accepted with the values that switch them off or are Ollama's default, else refused."""

CONTEXT = "num_ctx"
"""The context that the client needs: refused if the model has less."""

# Options whose negative values mean no limit or a random seed.
_AS_IT_COMES = frozenset({"num_predict", "seed"})
_EFFORTS: dict[object, str] = {
    True: "medium",
    False: "none",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "max": "high",
}
# Options that other APIs have as fields, or under another name.
_KNOWN_OPTIONS = MAPPED.keys() | NO_EFFECT | NEUTRAL.keys() | {CONTEXT}
_OPTIONS = {name: f"options.{name}" for name in _KNOWN_OPTIONS} | {
    name: f"options.{own}" for name, own in MEANT.items()
}
_RENAMED_FIELDS = _OPTIONS | {
    "response_format": "format",
    "reasoning_effort": "think",
    "thinking": "think",
}
# Unsupported fields of `/api/generate`, each with advice.
_UNSUPPORTED = {
    "template": "The model's own chat template is used; leave 'template' out, or send the finished text with "
    "'raw': true.",
    "context": "This gateway keeps no conversations as tokens; send the messages so far to /api/chat.",
    "width": "The models of this fleet make text, no images; leave 'width' out.",
    "height": "The models of this fleet make text, no images; leave 'height' out.",
    "steps": "The models of this fleet make text, no images; leave 'steps' out.",
}


def translate_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's parameters.

    Raises:
        RefusedError: an option is unknown, or would have an effect that the engine does not have.

    """
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name in NO_EFFECT or name == CONTEXT or value is None:
            continue
        if name in NEUTRAL:
            _check_neutral(name, value)
            continue
        known = MAPPED.get(name)
        if known is None:
            message = unknown_name("option", name, _KNOWN_OPTIONS, MEANT)
            raise invalid(message, param=f"options.{name[:100]}")
        number = int(value) if isinstance(value, float) and value.is_integer() else value
        if name in _AS_IT_COMES and isinstance(number, int) and number < (name == "num_predict"):
            continue
        if name != "stop" or value:
            found[known] = number
    return found


def _check_neutral(name: str, value: object) -> None:
    if value in NEUTRAL[name]:
        return
    neutral = " or ".join(orjson.dumps(one).decode() for one in NEUTRAL[name])
    raise invalid(
        f"The engines of this fleet do not have the option '{name}'; leave it out, or send {neutral}.",
        param=f"options.{name}",
    )


def needed_context(options: Mapping[str, Any] | None) -> int:
    """Return the tokens of context that a client asks for; 0 if it does not."""
    value = (options or {}).get(CONTEXT)
    return int(value) if isinstance(value, int | float) and value > 0 else 0


def keep_alive_s(keep_alive: float | str | None) -> float | None:
    """Return the seconds for which a model should stay loaded; infinite if for ever, None if it is not said.

    Raises:
        RefusedError: it is neither a number nor a duration of Go.

    """
    if keep_alive is None or keep_alive == "":
        return None
    if isinstance(keep_alive, str):
        found = _SECONDS.fullmatch(keep_alive)
        seconds = float(keep_alive) if found else _go_duration_s(keep_alive)
    else:
        seconds = keep_alive
    return math.inf if seconds < 0 else seconds


_SECONDS = re.compile(r"-?\d{1,12}(\.\d{1,9})?", re.ASCII)
_GO_DURATION = re.compile(
    r"(?P<sign>-?)(?P<parts>(\d{1,12}(\.\d{1,9})?(ns|us|µs|ms|s|m|h))+)", re.ASCII
)
_GO_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
_GO_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def _go_duration_s(text: str) -> float:
    found = _GO_DURATION.fullmatch(text) if len(text) <= 100 else None
    if found is None:
        raise invalid(
            f'\'keep_alive\' must be seconds or a duration such as "5m" or "-1"; it is {text[:50]!r}.',
            param="keep_alive",
        )
    seconds = sum(
        float(number) * _GO_UNITS[unit] for number, unit in _GO_PART.findall(found["parts"])
    )
    return -seconds if found["sign"] else seconds


class OllamaFunction(msgspec.Struct):
    """The function of a call. Clients send back what any server answered: other fields of messages are ignored."""

    name: str
    arguments: dict[str, Any] | str | None = None
    index: int | None = None
    description: str | None = None


class OllamaToolCall(msgspec.Struct):
    """A tool call of an earlier turn."""

    function: OllamaFunction
    id: str | None = None
    type: str | None = None


class OllamaMessage(msgspec.Struct):
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
        RefusedError: there are too many messages, an image is no text, or a result answers no call.

    """
    check_messages(messages)
    waiting = _WaitingCalls(())
    found: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        shown: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.images:
            where = f"messages[{index}].images"
            shown["content"] = _with_images(message.content, message.images, where)
        if message.thinking:
            shown["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = [
                _call(call, f"call_{index}_{at}") for at, call in enumerate(message.tool_calls)
            ]
            shown["tool_calls"] = calls
            waiting = _WaitingCalls(calls)
        if message.role == "tool":
            id_ = waiting.answer(message)
            if id_ is None:
                raise _answers_nothing(index)
            shown["tool_call_id"] = id_
        found.append(shown)
    return found


def _with_images(text: str | None, images: Sequence[Any], where: str) -> list[dict[str, Any]]:
    """Return OpenAI's parts of a message: Ollama's images come before its text, as base64 without a format."""
    parts: list[dict[str, Any]] = []
    for at, image in enumerate(images):
        if not isinstance(image, str):
            raise invalid("An image must be base64 in a string.", param=f"{where}[{at}]")
        url = image if image.startswith("data:") else f"data:image/png;base64,{image}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return [*parts, {"type": "text", "text": text}] if text else parts


def _call(call: OllamaToolCall, id_: str) -> dict[str, Any]:
    given = call.function.arguments
    arguments = given if isinstance(given, str) else orjson.dumps(given or {}).decode()
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id or id_, "type": "function", "function": function}


class _WaitingCalls:
    """The calls of one turn that have no result yet. Finding one takes the same time among two and among thousands."""

    def __init__(self, calls: Sequence[dict[str, Any]]) -> None:
        self._ids = [call["id"] for call in calls]
        self._waiting = set(range(len(calls)))
        self._places: defaultdict[tuple[str, str], deque[int]] = defaultdict(deque)
        """Places of calls by id, by name, and of all, in order; answered ones are skipped."""
        for at, call in enumerate(calls):
            for key in (("id", call["id"]), ("name", call["function"]["name"]), ("", "")):
                self._places[key].append(at)

    def answer(self, message: OllamaMessage) -> str | None:
        """Return the id of the call that a result belongs to: by its id, else its name, else its position."""
        key = ("", "")
        if message.tool_call_id:
            key = ("id", message.tool_call_id)
        elif message.tool_name:
            key = ("name", message.tool_name)
        places = self._places.get(key)
        while places:
            at = places.popleft()
            if at in self._waiting:
                self._waiting.remove(at)
                return str(self._ids[at])
        return None


def _answers_nothing(index: int) -> RefusedError:
    return invalid(
        "A message of the role 'tool' must follow an assistant's message whose 'tool_calls' it answers, one "
        "message a call; name the function in 'tool_name'.",
        param=f"messages[{index}]",
    )


class RequestFields(msgspec.Struct, forbid_unknown_fields=True):
    """Fields of every request to a model."""

    model: str
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None
    truncate: bool | None = None


class _Generation(RequestFields):
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


class EmbedBody(RequestFields):
    """Body of `/api/embed`."""

    input: str | list[str] = ""
    dimensions: int | None = None
    truncate: bool | None = None


class EmbeddingsBody(RequestFields):
    """Body of `/api/embeddings`, the older form."""

    prompt: str = ""


_TRUNCATED: Final = {"truncate_prompt_tokens": -1}
"""vLLM's parameter: cut texts to the model's own limit."""
_CHAT = msgspec.json.Decoder(ChatBody)
_GENERATE = msgspec.json.Decoder(GenerateBody)
_EMBED = msgspec.json.Decoder(EmbedBody)
_EMBEDDINGS = msgspec.json.Decoder(EmbeddingsBody)


def read_chat(body: bytes) -> ChatBody:
    """Return the decoded body of a chat request.

    Raises:
        RefusedError: the body is invalid.

    """
    return decode(_CHAT, body, _RENAMED_FIELDS)


def read_generate(body: bytes) -> GenerateBody:
    """Return the decoded body of a generate request.

    Raises:
        RefusedError: the body is invalid or has an unsupported field.

    """
    body_fields = decode(_GENERATE, body, _RENAMED_FIELDS)
    for name, why in _UNSUPPORTED.items():
        if getattr(body_fields, name):
            raise invalid(why, param=name)
    return body_fields


def read_embed(body: bytes) -> EmbedBody:
    """Return the decoded body of an embed request.

    Raises:
        RefusedError: the body is invalid.

    """
    return decode(_EMBED, body, _OPTIONS)


def read_embeddings(body: bytes) -> EmbeddingsBody:
    """Return the decoded body of an embeddings request.

    Raises:
        RefusedError: the body is invalid.

    """
    return decode(_EMBEDDINGS, body, _OPTIONS)


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
    """Return the prompt as an OpenAI chat request, or with `raw` or `suffix` as a completion request.

    Raises:
        RefusedError: a field has no equivalent.

    """
    body = _generation(body_fields)
    prompt = body_fields.prompt or ""
    if not is_completion(body_fields):
        system = [{"role": "system", "content": body_fields.system}] if body_fields.system else []
        images = body_fields.images
        content = _with_images(prompt, images, "images") if images else prompt
        return {**body, "messages": [*system, {"role": "user", "content": content}]}
    for name in ("system", "format", "think", "logprobs", "images"):
        if getattr(body_fields, name):
            other = "raw" if body_fields.raw else "suffix"
            raise invalid(f"'{name}' is for chats; leave it out, or '{other}'.", param=name)
    body.pop("reasoning_effort", None)
    return {**body, "prompt": prompt, **without_nones(suffix=body_fields.suffix or None)}


def is_completion(body_fields: GenerateBody) -> bool:
    """Return whether the prompt is a text that the model continues, without its chat template."""
    return bool(body_fields.raw or body_fields.suffix)


def embed_to_openai(body_fields: EmbedBody) -> dict[str, Any]:
    """Return the request as an OpenAI embeddings request."""
    return {
        "model": body_fields.model,
        "input": body_fields.input,
        # Ollama cuts longer texts unless the client forbids it.
        **({} if body_fields.truncate is False else _TRUNCATED),
        **without_nones(dimensions=body_fields.dimensions),
    }


def embeddings_to_openai(body_fields: EmbeddingsBody) -> dict[str, Any]:
    """Return the request as an OpenAI embeddings request."""
    return {"model": body_fields.model, "input": body_fields.prompt, **_TRUNCATED}


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
    effort = _EFFORTS.get(think)
    if effort is None:
        known = 'true, false, "low", "medium", "high" or "max"'
        raise invalid(f"'think' must be {known}; it is {str(think)[:50]!r}.", param="think")
    return effort


def _format(given: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(given, str):
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given}}
