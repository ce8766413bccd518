"""Asking an engine how it is, over loopback, with a time limit on everything."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from models import golden_question
from schemas.formation import GoldenAnswer

HEALTH_TIMEOUT_S = 2.0
# A first token on a cold model on a busy machine.
_PROBE_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """What the engine says of itself."""

    state: str
    message: str
    peak_bytes: int = 0
    """Most memory that it took so far; 0 if it does not say."""
    is_busy: bool = False
    """Whether `progress` has to grow."""
    progress: int = 0
    """What it has done so far, in no unit."""
    slowest_s: float = 0.0
    """Its slowest step so far, in seconds."""
    loaded: float = 0.0
    """How much of its weights it has loaded, from 0 to 1."""


class HealthClient:
    """Asks engines. `close()` when done."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._session: aiohttp.ClientSession | None = None

    def _url(self, port: int, path: str) -> str:
        return f"http://{self._host}:{port}{path}"

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._session

    async def ask(
        self, port: int, replica_uid: str, *, limit_s: float = HEALTH_TIMEOUT_S
    ) -> EngineHealth | None:
        """Return what the replica's engine says; None if it does not answer within the limit.

        Somebody else may listen on the port before our engine finds out that it is taken.
        """
        timeout = aiohttp.ClientTimeout(total=limit_s)
        try:
            async with self._client().get(self._url(port, "/health"), timeout=timeout) as response:
                tree = orjson.loads(await response.read())
            if tree["replicaUid"] != replica_uid:
                return None
            return _parse_health(tree)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError):
            return None

    async def probe(self, port: int, model: str) -> str:
        """Have one token generated, or read where none can be made; return what went wrong, or nothing."""
        made = {"model": model, "prompt": "1", "max_tokens": 1, "temperature": 0}
        counted = "completion_tokens"
        try:
            status, raw = await self._post(port, "/v1/completions", made)
            if status == 400 and orjson.loads(raw)["error"]["code"] == "not_a_text_model":
                read, counted = {"model": model, "input": "1"}, "prompt_tokens"
                status, raw = await self._post(port, "/v1/embeddings", read)
            if status != 200:
                return f"the first token failed: {raw[:200].decode('utf-8', 'replace')}"
            tokens = int(orjson.loads(raw)["usage"][counted])
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

    async def golden(self, port: int, model: str) -> tuple[GoldenAnswer | None, str]:
        """Ask the golden question; return the answer, or what went wrong.

        A model that only reads has no answer: there it is asked to read, and neither comes back.
        """
        try:
            body = golden_question.request_body(model)
            status, raw = await self._post(port, golden_question.PATH, body)
            if status == 200:
                return golden_question.read_answer(orjson.loads(raw), is_reference=False), ""
            if status == 400 and orjson.loads(raw)["error"]["code"] == "not_a_text_model":
                return None, await self.probe(port, model)
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

    async def _post(self, port: int, path: str, body: Mapping[str, object]) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S)
        async with self._client().post(self._url(port, path), json=body, timeout=timeout) as got:
            return got.status, await got.read()

    async def close(self) -> None:
        """Let go of connections."""
        if self._session is not None:
            await self._session.close()


def _parse_health(tree: Mapping[str, Any]) -> EngineHealth:
    """Return what an answer of /health says; raises LookupError, TypeError or ValueError if it is none."""
    total_bytes = int(tree.get("totalBytes", 0))
    return EngineHealth(
        state=str(tree["state"]),
        message=str(tree.get("message", "")),
        peak_bytes=max(0, int(tree.get("peakBytes", 0))),
        is_busy=tree.get("busy") is True,
        progress=int(tree.get("progress", 0)),
        slowest_s=max(0.0, float(tree.get("slowest_s", 0.0))),
        loaded=int(tree.get("loadedBytes", 0)) / total_bytes if total_bytes > 0 else 0.0,
    )
