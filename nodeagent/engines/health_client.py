"""Health and probe requests to engines over HTTP, with a time limit on each."""

import io
import logging
import wave
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import aiohttp
import orjson

from models import golden_question
from nodeagent.engines.engine_http import EngineHttp
from nodeagent.engines.tls import NodeTls
from schemas import local_network
from schemas.formation import GoldenAnswer
from schemas.wire.audio_limits import SpeechTask
from schemas.wire.engine_address import EngineAddress
from schemas.wire.errors import ErrorBody

log = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 2.0
FIRST_STEP_LIMIT_S: Final = 120.0
"""The time for the first step of a cold model on a busy machine, in seconds, as long as for a stuck load."""
# The probe is the first request: its first step, and the few that follow.
_PROBE_TIMEOUT_S = FIRST_STEP_LIMIT_S + 30.0
# Another process may listen at an engine's address. The largest answer of an engine is an embedding, below 1 MiB.
_MAX_BODY_BYTES = 4 << 20
# The code with which an embedding model refuses a completion.
_NOT_A_TEXT_MODEL = "not_a_text_model"
# The code with which a cross-encoder refuses an embedding.
_NOT_AN_EMBEDDING_MODEL = "not_an_embedding_model"
# The codes with which a model of speech refuses a completion.
_SPEECH_CODES: Final[Mapping[str, SpeechTask]] = {
    "model_transcribes": "Transcribe",
    "model_speaks": "Speak",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """An engine's answer to /health."""

    state: str
    message: str
    peak_bytes: int = 0
    """Its peak memory; 0 if unknown."""
    is_busy: bool = False
    """True if `progress` must grow."""
    progress: int = 0
    """A count of its work so far, without a unit."""
    slowest_s: float = 0.0
    """Its slowest step so far, in seconds."""
    ready_after_s: float = 0.0
    """Seconds from its start to the first request that it could take; 0 before, and if unknown."""
    prefixes: tuple[str, str] = ("", "")
    """Reason and message of PrefixesPinned; empty without prefixes."""
    loaded: float = 0.0
    """The part of its weights that is loaded, from 0 to 1."""


class HealthPort(Protocol):
    """The port to the health and probes of engines."""

    async def ask(
        self, address: EngineAddress, replica_uid: str, *, limit_s: float = HEALTH_TIMEOUT_S
    ) -> EngineHealth | None:
        """Return the health of the replica's engine; None if it does not answer within the limit."""
        ...

    async def probe(self, address: EngineAddress, model: str) -> str:
        """Generate one token; return the error, "" if there is none."""
        ...

    async def golden(self, address: EngineAddress, model: str) -> tuple[GoldenAnswer | None, str]:
        """Ask the golden question; return (answer, ""), (None, error), or (None, "") for a model without text."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


class HealthClient:
    """Asks engines over HTTP (`HealthPort`). Call `close()` when done."""

    def __init__(self, tls: NodeTls | None = None) -> None:
        """`tls`: the node's identity, for engines that serve TLS."""
        self._http = EngineHttp(tls)
        self._without_route: set[EngineAddress] = set()
        """Engines whose log line about EHOSTUNREACH is written."""

    async def ask(
        self, address: EngineAddress, replica_uid: str, *, limit_s: float = HEALTH_TIMEOUT_S
    ) -> EngineHealth | None:
        """Return the health of the replica's engine; None if it does not answer within the limit.

        An answer of another replica counts as none: its process may have taken the address before our engine did.
        """
        try:
            raw = await self._http.get(
                address, "/health", limit_s=limit_s, max_bytes=_MAX_BODY_BYTES
            )
            tree = orjson.loads(raw)
            self._without_route.discard(address)
            if tree["replicaUid"] != replica_uid:
                return None
            total_bytes = int(tree.get("totalBytes", 0))
            return EngineHealth(
                state=str(tree["state"]),
                message=str(tree.get("message", "")),
                peak_bytes=max(0, int(tree.get("peakBytes", 0))),
                is_busy=tree.get("busy") is True,
                progress=int(tree.get("progress", 0)),
                slowest_s=max(0.0, float(tree.get("slowest_s", 0.0))),
                ready_after_s=max(0.0, float(tree.get("readyAfter_s", 0.0))),
                prefixes=(str(tree.get("prefixes", "")), str(tree.get("prefixesMessage", ""))),
                loaded=int(tree.get("loadedBytes", 0)) / total_bytes if total_bytes > 0 else 0.0,
            )
        except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
            if local_network.has_no_route(error) and address not in self._without_route:
                self._without_route.add(address)
                why = local_network.failure_text(error, address.host)
                log.warning("no route to an engine", extra={"url": address.url, "why": why})
            return None

    async def probe(self, address: EngineAddress, model: str) -> str:
        """Generate one token, or what the model makes in place of text; return the error, "" if there is none."""
        completion = {"model": model, "prompt": "1", "max_tokens": 1, "temperature": 0}
        counter = "completion_tokens"
        try:
            status, raw = await self._post(address, "/v1/completions", completion)
            if status == 400 and _error_code(raw) == _NOT_A_TEXT_MODEL:
                embedding, counter = {"model": model, "input": "1"}, "prompt_tokens"
                status, raw = await self._post(address, "/v1/embeddings", embedding)
                if status == 400 and _error_code(raw) == _NOT_AN_EMBEDDING_MODEL:
                    pair = {"model": model, "text_1": "1", "text_2": "1"}
                    status, raw = await self._post(address, "/v1/score", pair)
            if status == 400 and (task := _SPEECH_CODES.get(_error_code(raw) or "")):
                return await self._probe_speech(address, model, task)
            if status != 200:
                return f"the first token failed: {raw[:200].decode('utf-8', 'replace')}"
            tokens = int(orjson.loads(raw)["usage"][counter])
        except (
            aiohttp.ClientError,
            TimeoutError,
            OSError,
            ValueError,
            KeyError,
            TypeError,
        ) as error:
            return f"the first token failed: {type(error).__name__} {error}"
        return "" if tokens >= 1 else "the engine answered without a token"

    async def _probe_speech(self, address: EngineAddress, model: str, task: SpeechTask) -> str:
        """Transcribe a moment of silence, or speak a word; return the error, "" if there is none."""
        if task == "Speak":
            word = {"model": model, "input": "One.", "response_format": "pcm"}
            status, raw = await self._post(address, "/v1/audio/speech", word)
        else:
            form = aiohttp.FormData({"model": model, "response_format": "text"})
            form.add_field("file", _silence(), filename="silence.wav", content_type="audio/wav")
            status, raw = await self._post(address, "/v1/audio/transcriptions", form)
        if status == 200 and raw:
            return ""
        return f"the first speech failed: {raw[:200].decode('utf-8', 'replace')}"

    async def golden(self, address: EngineAddress, model: str) -> tuple[GoldenAnswer | None, str]:
        """Ask the golden question; return (answer, ""), or (None, error).

        A model of speech, an embedding model or a cross-encoder has no such answer: it is probed once, and the result is (None, "").
        """
        try:
            body = golden_question.request_body(model)
            status, raw = await self._post(address, golden_question.PATH, body)
            if status == 200:
                return golden_question.read_answer(orjson.loads(raw), is_reference=False), ""
            if status == 400 and _error_code(raw) in (_NOT_A_TEXT_MODEL, *_SPEECH_CODES):
                return None, await self.probe(address, model)
        except (
            aiohttp.ClientError,
            TimeoutError,
            OSError,
            ValueError,
            LookupError,
            TypeError,
        ) as e:
            return None, f"the golden answer failed: {type(e).__name__} {e}"
        return None, f"the golden answer failed: {raw[:200].decode('utf-8', 'replace')}"

    async def _post(
        self, address: EngineAddress, path: str, body: Mapping[str, object] | aiohttp.FormData
    ) -> tuple[int, bytes]:
        return await self._http.post(
            address, path, body, limit_s=_PROBE_TIMEOUT_S, max_bytes=_MAX_BODY_BYTES
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()


def _silence() -> bytes:
    """Return a wav file of a tenth of a second."""
    held = io.BytesIO()
    with wave.open(held, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(bytes(3200))
    return held.getvalue()


def _error_code(body: bytes) -> str | None:
    error = ErrorBody.parse(body)
    return None if error is None else error.code
