"""Refusals as Ollama tells them. Does no I/O.

Engines' answers as Ollama tells them: lines of JSON, or one body. Does no I/O.

Durations are the engine's own measurement (`include_performance`), the total is the gateway's.

Embeddings as Ollama tells them. The numbers are passed on as the engine wrote them, and never parsed.

What Ollama's clients ask about models besides answers: which there are, and what they can. Pure.

A fleet knows no files, so sizes are 0 and families unknown; a digest is one of the name.
"""

import hashlib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeAlias

import msgspec
import orjson
from typing_extensions import override

from gateway.apis import openai_response
from gateway.apis.adapter import ResponseTranslator
from gateway.apis.ollama import request_translator
from gateway.apis.openai_response import (
    COMPLETE,
    EngineError,
    ResponseChoice,
    ResponsePiece,
    ResponseReader,
    ResponseUsage,
    ToolCallAssembler,
)
from gateway.errors import Refusal
from gateway.routing.table import ServedModel
from gateway.upstream.connection import Headers
from machinery.clock import Clock

_LINES = (b"content-type", b"application/x-ndjson")
# What the engine calls what a client called otherwise.
_WORDS = {name: own for own, name in request_translator.MAPPED.items() if own != name}
_WORDS |= {"reasoning_effort": "think", "response_format": "format"}


def error_body(message: str) -> bytes:
    """Return an engine's refusal with this API's names in it."""
    for engines, own in _WORDS.items():
        message = message.replace(f"'{engines}'", f"'{own}'")
    return orjson.dumps({"error": message})


class OllamaErrorTranslator(ResponseTranslator):
    """Tells refusals, whoever refused: with this API's names for an engine's."""

    @override
    def whole(self, status: int, headers: Headers, body: bytes) -> tuple[int, Headers, bytes]:
        return status, headers, error_body(openai_response.error_message(body))

    @override
    def begin(self, headers: Headers) -> Headers:
        return [_LINES, *(header for header in headers if header[0] != b"content-type")]

    @override
    def events(self, data: bytes) -> bytes:
        return b""

    @override
    def end(self) -> bytes:
        return b""

    @override
    def broken(self, refusal: Refusal) -> bytes:
        return error_body(refusal.message) + b"\n"


class OllamaClientErrorTranslator(OllamaErrorTranslator):
    """Tells why a request was refused before it was one to an engine: its names are the client's own."""

    @override
    def whole(self, status: int, headers: Headers, body: bytes) -> tuple[int, Headers, bytes]:
        return status, headers, orjson.dumps({"error": openai_response.error_message(body)})


_DONE_LINE = b',"done":false}\n'


class GenerationTranslator(OllamaErrorTranslator):
    """Tells one answer to `/api/chat` or `/api/generate`."""

    def __init__(self, model: str, clock: Clock, *, is_chat: bool) -> None:
        """`model`: as the client calls it."""
        self._head = b'{"model":' + orjson.dumps(model) + b',"created_at":"'
        self._clock = clock
        self._began_s = clock.monotonic()
        self._is_chat = is_chat
        self._calls = ToolCallAssembler()
        self._heard = ResponseReader()

    @override
    def whole(self, status: int, headers: Headers, body: bytes) -> tuple[int, Headers, bytes]:
        if status != 200:
            return super().whole(status, headers, body)
        choice = self._heard.whole(body)
        if isinstance(choice, EngineError):
            return 502, headers, error_body(choice.message)
        self._calls.take_all(choice.said().tool_calls or ())
        return 200, headers, self._last(choice)

    @override
    def events(self, data: bytes) -> bytes:
        return b"".join(map(self._event, self._heard.pieces(openai_response.event_payloads(data))))

    @override
    def broken(self, refusal: Refusal) -> bytes:
        return b"" if self._heard.is_over else super().broken(refusal)

    @override
    def end(self) -> bytes:
        return b"" if self._heard.is_over else self._event(self._heard.cut())

    def _event(self, piece: ResponsePiece) -> bytes:
        if isinstance(piece, EngineError):
            return error_body(piece.message) + b"\n"
        return self._last(ResponseChoice()) + b"\n" if piece == COMPLETE else self._piece(piece)

    def _piece(self, choice: ResponseChoice) -> bytes:
        said = choice.said()
        if said.tool_calls:
            self._calls.take(said.tool_calls)
        calls = self._called() if choice.finish_reason is not None else []
        if not (said.content or said.reasoning_content or calls):
            return b""
        created = self._clock.now().isoformat().encode()
        return self._head + created + b'"' + self._shown(choice, calls) + _DONE_LINE

    def _shown(self, choice: ResponseChoice, calls: Sequence[dict[str, Any]]) -> bytes:
        """Return the members that say something, each with a comma before it."""
        said = choice.said()
        text = orjson.dumps(said.content or "")
        more = b""
        if said.reasoning_content:
            more += b',"thinking":' + orjson.dumps(said.reasoning_content)
        if calls:
            more += b',"tool_calls":' + orjson.dumps(calls)
        if self._is_chat:
            shown = b',"message":{"role":"assistant","content":' + text + more + b"}"
        else:
            shown = b',"response":' + text + more
        if choice.logprobs is not None and choice.logprobs.content:
            shown += b',"logprobs":' + choice.logprobs.content
        return shown

    def _called(self) -> list[dict[str, Any]]:
        return [
            {"id": id_, "function": {"index": index, "name": name, "arguments": arguments}}
            for index, (id_, name, arguments) in enumerate(self._calls.complete())
        ]

    def _last(self, choice: ResponseChoice) -> bytes:
        """Return what ends an answer, with all of it if it was not streamed."""
        calls = self._called() if choice.finish_reason is not None else []
        created = self._clock.now().isoformat().encode()
        told = {
            "done": True,
            "done_reason": "length" if self._heard.last.finish_reason == "length" else "stop",
            **self._durations(),
        }
        return (
            self._head + created + b'"' + self._shown(choice, calls) + b"," + orjson.dumps(told)[1:]
        )

    def _durations(self) -> dict[str, int]:
        """Return counts, and times in nanoseconds: load is the wait for a place at the engine."""
        usage, took = self._heard.usage, self._heard.performance
        made = usage.completion_tokens
        rate = took.decode_tokens_per_s
        return {
            "total_duration": round((self._clock.monotonic() - self._began_s) * 1e9),
            "load_duration": round((took.queue_s or 0) * 1e9),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": round((took.prefill_s or 0) * 1e9),
            "eval_count": made,
            # The first token comes with the prompt.
            "eval_duration": round((made - 1) / rate * 1e9) if rate else 0,
        }


class LoadTranslator(OllamaErrorTranslator):
    """Tells a client that sent no prompt, which is how Ollama is asked to have a model ready."""

    def __init__(self, model: str, clock: Clock, *, is_chat: bool, is_streamed: bool) -> None:
        """`model`: as the client calls it."""
        self._model = model
        self._clock = clock
        self._is_chat = is_chat
        self._is_streamed = is_streamed

    @override
    def whole(self, status: int, headers: Headers, body: bytes) -> tuple[int, Headers, bytes]:
        if status != 200:
            return super().whole(status, headers, body)
        said = (
            {"message": {"role": "assistant", "content": ""}} if self._is_chat else {"response": ""}
        )
        told = {
            "model": self._model,
            "created_at": self._clock.now().isoformat(),
            **said,
            "done": True,
            "done_reason": "load",
        }
        line = orjson.dumps(told)
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
    """Tells one answer to `/api/embed`, or to `/api/embeddings`, which is the older form of it."""

    def __init__(self, model: str, clock: Clock, *, is_single: bool) -> None:
        """`model`: as the client calls it."""
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
            told = orjson.dumps({"error": f"The engine's answer makes no sense: {error}"})
            return 502, headers, told
        vectors = b",".join(bytes(one.embedding) for one in found.data)
        if self._is_single:
            return 200, headers, b'{"embedding":' + vectors + b"}"
        told = orjson.dumps(
            {
                "model": self._model,
                "total_duration": round((self._clock.monotonic() - self._began_s) * 1e9),
                "load_duration": 0,
                "prompt_eval_count": found.usage.prompt_tokens,
            }
        )
        return 200, headers, told[:-1] + b',"embeddings":[' + vectors + b"]}"


Json: TypeAlias = dict[str, Any]

# The version of Ollama whose API this is; clients refuse to talk to servers that are too old for them.
VERSION = "0.13.0"
# Nothing of this fleet is unloaded because nobody asked for it.
_FOR_EVER = "9999-12-31T23:59:59Z"
_DETAILS = {
    "parent_model": "",
    "format": "mlx",
    "family": "",
    "families": None,
    "parameter_size": "",
    "quantization_level": "",
}
_ARCHITECTURE = "mlx"


def tags_body(models: Iterable[ServedModel]) -> Json:
    """Return the answer to `/api/tags`."""
    return {"models": [_model_entry(model) for model in models]}


def running_body(models: Iterable[ServedModel], contexts: dict[str, int]) -> Json:
    """Return the answer to `/api/ps`: those that somebody serves, or did when the store was last heard; `contexts` in tokens, by name."""
    found = []
    for model in models:
        if not model.ready() and not model.kept():
            continue
        entry = {**_model_entry(model), "expires_at": _FOR_EVER, "size_vram": 0}
        del entry["modified_at"]
        found.append({**entry, "context_length": contexts.get(model.name, 0)})
    return {"models": found}


def show_body(model: ServedModel, context: int) -> Json:
    """Return the answer to `/api/show`; `context` in tokens, 0 if nobody knows."""
    info: Json = {"general.architecture": _ARCHITECTURE, "general.basename": model.name}
    if context:
        info[f"{_ARCHITECTURE}.context_length"] = context
    return {
        "modelfile": f"# Declared by a ModelDeployment or a ModelRoute.\nFROM {model.name}\n",
        "parameters": "",
        "template": "{{ .Prompt }}",
        "details": _DETAILS,
        "model_info": info,
        "capabilities": ["completion", "tools"],
        "modified_at": _modified_at(model),
    }


def _model_entry(model: ServedModel) -> Json:
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": _modified_at(model),
        "size": 0,
        "digest": hashlib.sha256(model.name.encode()).hexdigest(),
        "details": _DETAILS,
    }


def _modified_at(model: ServedModel) -> str:
    return datetime.fromtimestamp(model.created, UTC).isoformat()
