"""Ollama's requests to models: which of its paths asks an engine for what."""

from typing import Any

import orjson
from typing_extensions import override

from gateway.asks import Ask, Heard
from gateway.clients.surface import Surface, Telling
from gateway.errors import invalid
from gateway.known.keeper import TableKeeper
from gateway.surfaces import asking as common
from gateway.surfaces.ollama import asking
from gateway.surfaces.ollama.asking import ChatBody, GenerateBody
from gateway.surfaces.ollama.refusing import Unread
from gateway.surfaces.ollama.telling import Generating, Loaded
from gateway.surfaces.ollama.vectors import Embedding
from machinery.clock import Clock

PATHS = ("/api/chat", "/api/generate", "/api/embed", "/api/embeddings")

_CHAT, _COMPLETION = "/v1/chat/completions", "/v1/completions"
_EMBEDDINGS, _TOKENIZE = "/v1/embeddings", "/tokenize"
# What Ollama's clients put behind a model's name that has no tag.
_TAG = ":latest"


class Ollama(Surface):
    """The surface of `PATHS`."""

    def __init__(self, keeper: TableKeeper, clock: Clock) -> None:
        self._keeper = keeper
        self._clock = clock

    @override
    def telling(self) -> Telling:
        return Unread()

    @override
    def read(self, heard: Heard) -> tuple[Ask, Telling]:
        try:
            return self._read(heard)
        except orjson.JSONEncodeError as error:
            raise common.impossible(error) from error

    def _read(self, heard: Heard) -> tuple[Ask, Telling]:
        match heard.path:
            case "/api/chat":
                return self._chat(heard)
            case "/api/generate":
                return self._generate(heard)
            case "/api/embed":
                embed = asking.read_embed(heard.body)
                telling = Embedding(embed.model, self._clock, is_single=False)
                return self._ask(heard, _EMBEDDINGS, asking.embed(embed)), telling
            case _:
                one = asking.read_embeddings(heard.body)
                telling = Embedding(one.model, self._clock, is_single=True)
                return self._ask(heard, _EMBEDDINGS, asking.embeddings(one)), telling

    def _chat(self, heard: Heard) -> tuple[Ask, Telling]:
        asked = asking.read_chat(heard.body)
        if not asked.messages:
            return self._load(heard, asked)
        ask = self._ask(heard, _CHAT, asking.chat(asked))
        return ask, Generating(asked.model, self._clock, is_chat=True)

    def _generate(self, heard: Heard) -> tuple[Ask, Telling]:
        asked = asking.read_generate(heard.body)
        if not asked.prompt:
            return self._load(heard, asked)
        path = _COMPLETION if asked.raw else _CHAT
        ask = self._ask(heard, path, asking.generate(asked))
        return ask, Generating(asked.model, self._clock, is_chat=False)

    def _load(self, heard: Heard, asked: ChatBody | GenerateBody) -> tuple[Ask, Telling]:
        """Ask an engine for next to nothing: one that is not there yet is waited for."""
        if str(asked.keep_alive) in ("0", "0.0", "0s"):
            raise invalid(
                "Clients do not unload models here; set `replicas: 0` in the ModelDeployment to have it go.",
                param="keep_alive",
            )
        ask = self._ask(heard, _TOKENIZE, {"model": asked.model, "prompt": "hello"})
        is_streamed = asked.stream is not False
        is_chat = isinstance(asked, ChatBody)
        return ask, Loaded(asked.model, self._clock, is_chat=is_chat, is_streamed=is_streamed)

    def _ask(self, heard: Heard, path: str, body: dict[str, Any]) -> Ask:
        body["model"] = known_as(self._keeper, body["model"])
        return common.ask(heard, path, body)


def known_as(keeper: TableKeeper, name: str) -> str:
    """Return the model's name without the tag that clients add, if only that one is known."""
    bare = name.removesuffix(_TAG)
    models = keeper.table.models
    return bare if name not in models and bare in models else name
