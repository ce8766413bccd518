"""Adapter of Ollama's API: the engine request for each of its paths."""

import re
from typing import Any

import orjson
from typing_extensions import override

from gateway.apis import adapter as common
from gateway.apis.adapter import ApiAdapter, ResponseTranslator
from gateway.apis.ollama import request_translator
from gateway.apis.ollama.request_translator import ChatBody, GenerateBody, RequestFields
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
# The places that Ollama's clients write before the name of a repository.
_HUB_HOST = re.compile(r"^(https://)?(hf|huggingface)\.co/")


class OllamaAdapter(ApiAdapter):
    """Adapter of `PATHS`."""

    def __init__(self, table_cache: TableCache, clock: Clock) -> None:
        self._table_cache = table_cache
        self._clock = clock

    @override
    def error_translator(self) -> ResponseTranslator:
        return OllamaClientErrorTranslator()

    @override
    def find_model(self, body: bytes) -> str:
        return resolve_name(self._table_cache, super().find_model(body))

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
                body = request_translator.embed_to_openai(embed)
                return self._ask(http_request, _EMBEDDINGS, body, embed), translator
            case _:
                embeddings = request_translator.read_embeddings(http_request.body)
                translator = EmbeddingTranslator(embeddings.model, self._clock, is_single=True)
                body = request_translator.embeddings_to_openai(embeddings)
                return self._ask(http_request, _EMBEDDINGS, body, embeddings), translator

    def _chat(self, http_request: HttpRequest) -> tuple[InferenceRequest, ResponseTranslator]:
        body_fields = request_translator.read_chat(http_request.body)
        if not body_fields.messages:
            return self._load(http_request, body_fields)
        body = request_translator.chat_to_openai(body_fields)
        request = self._ask(http_request, _CHAT, body, body_fields)
        return request, GenerationTranslator(body_fields.model, self._clock, is_chat=True)

    def _generate(self, http_request: HttpRequest) -> tuple[InferenceRequest, ResponseTranslator]:
        body_fields = request_translator.read_generate(http_request.body)
        if not body_fields.prompt and not body_fields.suffix:
            return self._load(http_request, body_fields)
        path = _COMPLETION if request_translator.is_completion(body_fields) else _CHAT
        body = request_translator.generate_to_openai(body_fields)
        request = self._ask(http_request, path, body, body_fields)
        return request, GenerationTranslator(body_fields.model, self._clock, is_chat=False)

    def _load(
        self, http_request: HttpRequest, body_fields: ChatBody | GenerateBody
    ) -> tuple[InferenceRequest, ResponseTranslator]:
        """Return a minimal engine request, which waits until the model is ready; with keep_alive 0, one that no engine gets."""
        body = {"model": body_fields.model, "prompt": "hello"}
        request = self._ask(http_request, _TOKENIZE, body, body_fields)
        request.is_unload = request.keep_alive_s == 0
        return request, LoadTranslator(
            body_fields.model,
            self._clock,
            is_chat=isinstance(body_fields, ChatBody),
            is_streamed=body_fields.stream is not False,
            reason="unload" if request.is_unload else "load",
        )

    def _ask(
        self, http_request: HttpRequest, path: str, body: dict[str, Any], given: RequestFields
    ) -> InferenceRequest:
        """Return the engine request. `given`: the body as the client sent it."""
        body["model"] = name = resolve_name(self._table_cache, body["model"])
        self._check_context(name, given)
        request = common.to_inference_request(http_request, path, body)
        request.keep_alive_s = request_translator.keep_alive_s(given.keep_alive)
        return request

    def _check_context(self, name: str, given: RequestFields) -> None:
        """Refuse a request for more context than the model has: Ollama would load it with more."""
        needed = request_translator.needed_context(given.options)
        model = self._table_cache.table.models.get(name)
        context = None if model is None else model.context_length
        if context is not None and needed > context:
            raise invalid(
                f"The model '{name}' has a context of {context} tokens, and 'num_ctx' asks for {needed}. Leave it out, "
                f"or send at most {context}; spec.contextLength of the ModelDeployment gives more.",
                param="options.num_ctx",
            )


def resolve_name(table_cache: TableCache, name: str) -> str:
    """Return the model name without its tag, if only that name is known, and a repository without the hub before it."""
    name = _HUB_HOST.sub("", name)
    bare = name.removesuffix(_TAG)
    models = table_cache.table.models
    return bare if name not in models and bare in models else name
