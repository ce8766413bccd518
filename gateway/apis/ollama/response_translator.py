"""Translates responses to Ollama's format: chats, generations, embeddings, errors and lists of models.

Durations are the engine's measurements (`include_performance`), the total is the gateway's. The digest of a model is
that of its name.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias

import msgspec
import orjson
from typing_extensions import override

from gateway.apis import openai_response
from gateway.apis.adapter import ResponseTranslator
from gateway.apis.ollama import request_translator
from gateway.apis.ollama.model_facts import ModelFacts
from gateway.apis.openai_response import (
    AnswerTranslator,
    EngineError,
    ResponseChoice,
    ResponseUsage,
    ToolCallAssembler,
)
from gateway.routing.table import ServedModel
from gateway.upstream.call import Headers
from machinery.clock import Clock
from schemas.wire.errors import Refusal

_LINES = (b"content-type", b"application/x-ndjson")
# Ollama's names of fields that the engine knows by another name.
_OLLAMA_NAMES = {
    **{name: own for own, name in request_translator.MAPPED.items() if own != name},
    "reasoning_effort": "think",
    "response_format": "format",
}

_DONE_LINE = b',"done":false}\n'
Json: TypeAlias = dict[str, Any]
# The Ollama version of this API; clients refuse servers that are too old for them.
VERSION = "0.13.0"
# A model stays loaded unless its deployment may be scaled to zero, and then until the fleet decides.
_FOR_EVER = "9999-12-31T23:59:59Z"
_ARCHITECTURE = "mlx"


def error_body(message: str) -> bytes:
    """Return an engine's error with this API's field names."""
    for engines, own in _OLLAMA_NAMES.items():
        message = message.replace(f"'{engines}'", f"'{own}'")
    return orjson.dumps({"error": message})


class OllamaErrorTranslator(ResponseTranslator):
    """Translates errors, with this API's field names."""

    _waited_s = 0.0
    """Seconds that the request waited at the gateway, for a replica or a slot."""

    @override
    def take_wait(self, waited_s: float) -> None:
        self._waited_s = waited_s

    @override
    def whole(self, status: int, headers: Headers, body: bytes) -> tuple[int, Headers, bytes]:
        return status, headers, error_body(openai_response.error_message(body))

    @override
    def begin(self, headers: Headers) -> Headers:
        return [_LINES, *(header for header in headers if header[0] != b"content-type")]

    @override
    def broken(self, refusal: Refusal) -> bytes:
        return error_body(refusal.message) + b"\n"


class OllamaClientErrorTranslator(OllamaErrorTranslator):
    """Translates errors of requests that never reached an engine: their field names are the client's own."""

    @override
    def whole(self, status: int, headers: Headers, body: bytes) -> tuple[int, Headers, bytes]:
        return status, headers, orjson.dumps({"error": openai_response.error_message(body)})


class GenerationTranslator(AnswerTranslator, OllamaErrorTranslator):
    """Translates one response of `/api/chat` or `/api/generate`."""

    def __init__(self, model: str, clock: Clock, *, is_chat: bool) -> None:
        """`model`: the name that the client used."""
        super().__init__()
        self._head = b'{"model":' + orjson.dumps(model) + b',"created_at":"'
        self._clock = clock
        self._began_s = clock.monotonic()
        self._is_chat = is_chat
        self._calls = ToolCallAssembler()

    @override
    def message(self, choice: ResponseChoice) -> bytes:
        self._calls.take_all(choice.content_message().tool_calls or ())
        return self._last(choice)

    @override
    def failure(self, error: EngineError) -> bytes:
        return error_body(error.message) + b"\n"

    @override
    def last(self) -> bytes:
        return self._last(ResponseChoice()) + b"\n"

    @override
    def piece(self, choice: ResponseChoice) -> bytes:
        message = choice.content_message()
        if message.tool_calls:
            self._calls.take(message.tool_calls)
        calls = self._called() if choice.finish_reason is not None else []
        if not (message.content or message.reasoning_content or calls):
            return b""
        created = self._clock.now().isoformat().encode()
        return self._head + created + b'"' + self._shown(choice, calls) + _DONE_LINE

    def _shown(self, choice: ResponseChoice, calls: Sequence[dict[str, Any]]) -> bytes:
        """Return the members with content, each after a comma."""
        message = choice.content_message()
        text = orjson.dumps(message.content or "")
        extra = b""
        if message.reasoning_content:
            extra += b',"thinking":' + orjson.dumps(message.reasoning_content)
        if calls:
            extra += b',"tool_calls":' + orjson.dumps(calls)
        if self._is_chat:
            content = b',"message":{"role":"assistant","content":' + text + extra + b"}"
        else:
            content = b',"response":' + text + extra
        if choice.logprobs is not None and choice.logprobs.content:
            content += b',"logprobs":' + choice.logprobs.content
        return content

    def _called(self) -> list[dict[str, Any]]:
        return [
            {"id": id_, "function": {"index": index, "name": name, "arguments": arguments}}
            for index, (id_, name, arguments) in enumerate(self._calls.complete())
        ]

    def _last(self, choice: ResponseChoice) -> bytes:
        """Return the end of a response, with its content if it was not streamed."""
        calls = self._called() if choice.finish_reason is not None else []
        created = self._clock.now().isoformat().encode()
        members = {
            "done": True,
            "done_reason": "length" if self.final.finish_reason == "length" else "stop",
            **self._durations(),
        }
        return (
            self._head
            + created
            + b'"'
            + self._shown(choice, calls)
            + b","
            + orjson.dumps(members)[1:]
        )

    def _durations(self) -> dict[str, int]:
        """Return counts, and times in nanoseconds; `load_duration` is the wait here and in the engine's queue."""
        usage, took = self.usage, self.performance
        made = usage.completion_tokens
        rate = took.decode_tokens_per_s
        return {
            "total_duration": round((self._clock.monotonic() - self._began_s) * 1e9),
            "load_duration": round((self._waited_s + (took.queue_s or 0)) * 1e9),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": round((took.prefill_s or 0) * 1e9),
            "eval_count": made,
            # The first token belongs to the prompt's time.
            "eval_duration": round((made - 1) / rate * 1e9) if rate else 0,
        }


class LoadTranslator(OllamaErrorTranslator):
    """Translates the response to a request without a prompt, which loads a model in Ollama."""

    def __init__(
        self,
        model: str,
        clock: Clock,
        *,
        is_chat: bool,
        is_streamed: bool,
        reason: Literal["load", "unload"] = "load",
    ) -> None:
        """`model`: the name that the client used; `reason`: what was done."""
        self._reason = reason
        self._model = model
        self._clock = clock
        self._began_s = clock.monotonic()
        self._is_chat = is_chat
        self._is_streamed = is_streamed

    @override
    def whole(self, status: int, headers: Headers, body: bytes) -> tuple[int, Headers, bytes]:
        if status != 200:
            return super().whole(status, headers, body)
        message = (
            {"message": {"role": "assistant", "content": ""}} if self._is_chat else {"response": ""}
        )
        members = {
            "model": self._model,
            "created_at": self._clock.now().isoformat(),
            **message,
            "done": True,
            "done_reason": self._reason,
            "total_duration": round((self._clock.monotonic() - self._began_s) * 1e9),
            "load_duration": round(self._waited_s * 1e9),
        }
        line = orjson.dumps(members)
        return (
            (200, self.begin(headers), line + b"\n") if self._is_streamed else (200, headers, line)
        )


class _Vector(msgspec.Struct):
    embedding: msgspec.Raw


class _Vectors(msgspec.Struct):
    data: list[_Vector]
    usage: ResponseUsage = msgspec.field(default_factory=ResponseUsage)


_VECTORS = msgspec.json.Decoder(_Vectors)


class EmbeddingTranslator(OllamaErrorTranslator):
    """Translates one response of `/api/embed`, or of `/api/embeddings`, its older form.

    Vectors are copied as the engine wrote them and never parsed.
    """

    def __init__(self, model: str, clock: Clock, *, is_single: bool) -> None:
        """`model`: the name that the client used."""
        self._model = model
        self._clock = clock
        self._began_s = clock.monotonic()
        self._is_single = is_single

    @override
    def whole(self, status: int, headers: Headers, body: bytes) -> tuple[int, Headers, bytes]:
        if status != 200:
            return super().whole(status, headers, body)
        try:
            found = _VECTORS.decode(body)
        except msgspec.DecodeError as error:
            members = orjson.dumps({"error": f"The engine's response is invalid: {error}"})
            return 502, headers, members
        vectors = b",".join(bytes(vector.embedding) for vector in found.data)
        if self._is_single:
            return 200, headers, b'{"embedding":' + vectors + b"}"
        members = orjson.dumps(
            {
                "model": self._model,
                "total_duration": round((self._clock.monotonic() - self._began_s) * 1e9),
                "load_duration": round(self._waited_s * 1e9),
                "prompt_eval_count": found.usage.prompt_tokens,
            }
        )
        return 200, headers, members[:-1] + b',"embeddings":[' + vectors + b"]}"


def digest(name: str) -> str:
    """Return the digest of a model: that of its name, because it may have several deployments."""
    return hashlib.sha256(name.encode()).hexdigest()


def tags_body(models: Iterable[ServedModel], facts: Mapping[str, ModelFacts]) -> Json:
    """Return the response of `/api/tags`."""
    return {"models": [_model_entry(model, facts[model.name]) for model in models]}


def running_body(
    models: Iterable[ServedModel],
    facts: Mapping[str, ModelFacts],
    kept_until: Callable[[ServedModel], datetime | None],
) -> Json:
    """Return the response of `/api/ps`: models with a replica. `kept_until`: the end of the clients' `keep_alive`."""
    found = []
    for model in models:
        if not model.ready() and not model.kept():
            continue
        until = kept_until(model)
        loaded_bytes = facts[model.name].loaded_bytes
        entry = {
            **_model_entry(model, facts[model.name]),
            "size": loaded_bytes,
            "size_vram": loaded_bytes,
            "expires_at": _FOR_EVER if until is None else until.isoformat(),
            "context_length": model.context_length or 0,
        }
        del entry["modified_at"]
        found.append(entry)
    return {"models": found}


def show_body(model: ServedModel, facts: ModelFacts) -> Json:
    """Return the response of `/api/show`."""
    architecture = facts.family or _ARCHITECTURE
    info: Json = {"general.architecture": architecture, "general.basename": model.name}
    if facts.parameters:
        info["general.parameter_count"] = facts.parameters
    if model.context_length:
        info[f"{architecture}.context_length"] = model.context_length
    source = facts.source or model.name
    return {
        "modelfile": f"# Declared by a ModelDeployment or a ModelRoute.\nFROM {source}\n",
        "parameters": "",
        "template": "{{ .Prompt }}",
        "details": _details(facts),
        "model_info": info,
        "capabilities": ["completion", "tools"],
        "modified_at": _modified_at(model),
    }


def _model_entry(model: ServedModel, facts: ModelFacts) -> Json:
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": _modified_at(model),
        "size": facts.weights_bytes,
        "digest": digest(model.name),
        "details": _details(facts),
    }


def _details(facts: ModelFacts) -> Json:
    return {
        "parent_model": "",
        "format": "mlx",
        "family": facts.family,
        "families": [facts.family] if facts.family else None,
        "parameter_size": facts.parameter_size,
        "quantization_level": "",
    }


def _modified_at(model: ServedModel) -> str:
    return datetime.fromtimestamp(model.created, UTC).isoformat()
