"""Adapter of Ollama's API: the engine request for each of its paths."""

from typing import Any

import orjson
from typing_extensions import override

from gateway.apis import adapter as common
from gateway.apis.adapter import ApiAdapter, ResponseTranslator
from gateway.apis.ollama import request_translator
from gateway.apis.ollama.request_translator import ChatBody, GenerateBody
from gateway.apis.ollama.response_translator import (
    EmbeddingTranslator,
    GenerationTranslator,
    LoadTranslator,
    OllamaClientErrorTranslator,
)
from gateway.request import HttpRequest, InferenceRequest
from gateway.state.table_cache import TableCache
from machinery.clock import Clock
from schemas.wire.errors import invalid

PATHS = ("/api/chat", "/api/generate", "/api/embed", "/api/embeddings")

_CHAT, _COMPLETION = "/v1/chat/completions", "/v1/completions"
_EMBEDDINGS, _TOKENIZE = "/v1/embeddings", "/tokenize"
# The tag that Ollama clients add to model names.
_TAG = ":latest"


class OllamaAdapter(ApiAdapter):
    """Adapter of `PATHS`."""

    def __init__(self, table_cache: TableCache, clock: Clock) -> None:
        self._table_cache = table_cache
        self._clock = clock

    @override
    def error_translator(self) -> ResponseTranslator:
        return OllamaClientErrorTranslator()

    @override
    def read(self, http_request: HttpRequest) -> tuple[InferenceRequest, ResponseTranslator]:
        try:
            return self._read(http_request)
        except orjson.JSONEncodeError as error:
            raise common.unencodable(error) from error

    def _read(self, http_request: HttpRequest) -> tuple[InferenceRequest, ResponseTranslator]:
        match http_request.path:
            case "/api/chat":
                return self._chat(http_request)
            case "/api/generate":
                return self._generate(http_request)
            case "/api/embed":
                embed = request_translator.read_embed(http_request.body)
                translator = EmbeddingTranslator(embed.model, self._clock, is_single=False)
                return self._ask(
                    http_request, _EMBEDDINGS, request_translator.embed_to_openai(embed)
                ), translator
            case _:
                one = request_translator.read_embeddings(http_request.body)
                translator = EmbeddingTranslator(one.model, self._clock, is_single=True)
                return self._ask(
                    http_request, _EMBEDDINGS, request_translator.embeddings_to_openai(one)
                ), translator

    def _chat(self, http_request: HttpRequest) -> tuple[InferenceRequest, ResponseTranslator]:
        body_fields = request_translator.read_chat(http_request.body)
        if not body_fields.messages:
            return self._load(http_request, body_fields)
        request = self._ask(http_request, _CHAT, request_translator.chat_to_openai(body_fields))
        return request, GenerationTranslator(body_fields.model, self._clock, is_chat=True)

    def _generate(self, http_request: HttpRequest) -> tuple[InferenceRequest, ResponseTranslator]:
        body_fields = request_translator.read_generate(http_request.body)
        if not body_fields.prompt:
            return self._load(http_request, body_fields)
        path = _COMPLETION if body_fields.raw else _CHAT
        request = self._ask(http_request, path, request_translator.generate_to_openai(body_fields))
        return request, GenerationTranslator(body_fields.model, self._clock, is_chat=False)

    def _load(
        self, http_request: HttpRequest, body_fields: ChatBody | GenerateBody
    ) -> tuple[InferenceRequest, ResponseTranslator]:
        """Return a minimal engine request, which waits until the model is ready."""
        if str(body_fields.keep_alive) in ("0", "0.0", "0s"):
            raise invalid(
                "Clients do not unload models here; set `replicas: 0` in the ModelDeployment to have it go.",
                param="keep_alive",
            )
        request = self._ask(
            http_request, _TOKENIZE, {"model": body_fields.model, "prompt": "hello"}
        )
        is_streamed = body_fields.stream is not False
        is_chat = isinstance(body_fields, ChatBody)
        return request, LoadTranslator(
            body_fields.model, self._clock, is_chat=is_chat, is_streamed=is_streamed
        )

    def _ask(self, http_request: HttpRequest, path: str, body: dict[str, Any]) -> InferenceRequest:
        body["model"] = resolve_name(self._table_cache, body["model"])
        return common.to_inference_request(http_request, path, body)


def resolve_name(table_cache: TableCache, name: str) -> str:
    """Return the model name without its tag, if only that name is known."""
    bare = name.removesuffix(_TAG)
    models = table_cache.table.models
    return bare if name not in models and bare in models else name
