"""Ollama's requests to models: which of its paths asks an engine for what."""

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
from gateway.errors import invalid
from gateway.request import HttpRequest, InferenceRequest
from gateway.state.table_cache import TableCache
from machinery.clock import Clock

PATHS = ("/api/chat", "/api/generate", "/api/embed", "/api/embeddings")

_CHAT, _COMPLETION = "/v1/chat/completions", "/v1/completions"
_EMBEDDINGS, _TOKENIZE = "/v1/embeddings", "/tokenize"
# What Ollama's clients put behind a model's name that has no tag.
_TAG = ":latest"


class OllamaAdapter(ApiAdapter):
    """The surface of `PATHS`."""

    def __init__(self, keeper: TableCache, clock: Clock) -> None:
        self._keeper = keeper
        self._clock = clock

    @override
    def telling(self) -> ResponseTranslator:
        return OllamaClientErrorTranslator()

    @override
    def read(self, heard: HttpRequest) -> tuple[InferenceRequest, ResponseTranslator]:
        try:
            return self._read(heard)
        except orjson.JSONEncodeError as error:
            raise common.unencodable(error) from error

    def _read(self, heard: HttpRequest) -> tuple[InferenceRequest, ResponseTranslator]:
        match heard.path:
            case "/api/chat":
                return self._chat(heard)
            case "/api/generate":
                return self._generate(heard)
            case "/api/embed":
                embed = request_translator.read_embed(heard.body)
                telling = EmbeddingTranslator(embed.model, self._clock, is_single=False)
                return self._ask(
                    heard, _EMBEDDINGS, request_translator.embed_to_openai(embed)
                ), telling
            case _:
                one = request_translator.read_embeddings(heard.body)
                telling = EmbeddingTranslator(one.model, self._clock, is_single=True)
                return self._ask(
                    heard, _EMBEDDINGS, request_translator.embeddings_to_openai(one)
                ), telling

    def _chat(self, heard: HttpRequest) -> tuple[InferenceRequest, ResponseTranslator]:
        asked = request_translator.read_chat(heard.body)
        if not asked.messages:
            return self._load(heard, asked)
        ask = self._ask(heard, _CHAT, request_translator.chat_to_openai(asked))
        return ask, GenerationTranslator(asked.model, self._clock, is_chat=True)

    def _generate(self, heard: HttpRequest) -> tuple[InferenceRequest, ResponseTranslator]:
        asked = request_translator.read_generate(heard.body)
        if not asked.prompt:
            return self._load(heard, asked)
        path = _COMPLETION if asked.raw else _CHAT
        ask = self._ask(heard, path, request_translator.generate_to_openai(asked))
        return ask, GenerationTranslator(asked.model, self._clock, is_chat=False)

    def _load(
        self, heard: HttpRequest, asked: ChatBody | GenerateBody
    ) -> tuple[InferenceRequest, ResponseTranslator]:
        """Ask an engine for next to nothing: one that is not there yet is waited for."""
        if str(asked.keep_alive) in ("0", "0.0", "0s"):
            raise invalid(
                "Clients do not unload models here; set `replicas: 0` in the ModelDeployment to have it go.",
                param="keep_alive",
            )
        ask = self._ask(heard, _TOKENIZE, {"model": asked.model, "prompt": "hello"})
        is_streamed = asked.stream is not False
        is_chat = isinstance(asked, ChatBody)
        return ask, LoadTranslator(
            asked.model, self._clock, is_chat=is_chat, is_streamed=is_streamed
        )

    def _ask(self, heard: HttpRequest, path: str, body: dict[str, Any]) -> InferenceRequest:
        body["model"] = resolve_name(self._keeper, body["model"])
        return common.to_inference_request(heard, path, body)


def resolve_name(keeper: TableCache, name: str) -> str:
    """Return the model's name without the tag that clients add, if only that one is known."""
    bare = name.removesuffix(_TAG)
    models = keeper.table.models
    return bare if name not in models and bare in models else name
