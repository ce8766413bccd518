"""Embeddings as Ollama tells them. The numbers are passed on as the engine wrote them, and never parsed."""

import msgspec
import orjson
from typing_extensions import override

from gateway.surfaces.answers import Usage
from gateway.surfaces.ollama.refusing import Refusing
from gateway.upstream.exchange import Headers
from machinery.clock import Clock


class _Vector(msgspec.Struct):
    embedding: msgspec.Raw


class _Vectors(msgspec.Struct):
    data: list[_Vector]
    usage: Usage = msgspec.field(default_factory=Usage)


_VECTORS = msgspec.json.Decoder(_Vectors)


class Embedding(Refusing):
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
