"""Clients of `bench.chaos`: requests whose texts are known, and a writer that remembers what was acknowledged."""

import asyncio
import itertools
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from store import keys
from store.etcd.connect import connect
from tests.support.fleet import Fleet

MODEL = "tiny"
_PROMPTS = 12
_PATH = "/v1/chat/completions"
_POOL = """
apiVersion: fleet/v1alpha1
kind: NodePool
metadata: {{name: {name}, labels: {{round: "{round}"}}}}
spec: {{selector: {{matchLabels: {{chaos: {name}}}}}}}
"""
_POOLS = 6
_RETRY_S = 0.2
_LIMIT = aiohttp.ClientTimeout(total=120, sock_read=60)


def _body(number: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"We hold these truths, number {number}: " * 3}],
        "max_tokens": 24 + number * 16,
        "temperature": 0,
    }


async def reference_texts(url: str) -> list[str]:
    """Return the text of each prompt by an engine that nobody disturbs."""
    texts: list[str] = []
    async with aiohttp.ClientSession(timeout=_LIMIT) as session:
        for number in range(_PROMPTS):
            async with session.post(url + _PATH, json=_body(number)) as response:
                texts.append((await response.json())["choices"][0]["message"]["content"])
    return texts


@dataclass
class Request:
    """One request and its end."""

    number: int
    is_streamed: bool
    began_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0
    is_right: bool | None = None
    """True if the text is that of the undisturbed engine; None if the request failed."""
    failure: str = ""
    is_refused: bool = False
    """True if there was no connection."""

    @property
    def lasted_s(self) -> float:
        """The time until its end."""
        return self.ended_s - self.began_s


class Clients:
    """Clients that ask one request after another."""

    def __init__(self, url: str, references: list[str]) -> None:
        self.done: list[Request] = []
        self._url = url
        self._references = references
        self._numbers = itertools.count()
        self._is_stopping = False

    def stop(self) -> None:
        """End after the requests that run."""
        self._is_stopping = True

    async def run(self, *, is_streamed: bool) -> None:
        """Be one client until `stop`."""
        while not self._is_stopping:
            request = await self.ask(next(self._numbers) % _PROMPTS, is_streamed=is_streamed)
            self.done.append(request)
            if request.failure:
                await asyncio.sleep(_RETRY_S)

    async def ask(self, number: int, *, is_streamed: bool) -> Request:
        """Send one request."""
        request = Request(number, is_streamed)
        text = ""
        try:
            # A connection of its own: the gateway may have been killed since the last request.
            async with (
                aiohttp.ClientSession(timeout=_LIMIT) as session,
                session.post(
                    self._url + _PATH, json=_body(number) | {"stream": is_streamed}
                ) as response,
            ):
                if response.status != 200:
                    request.failure = f"{response.status}: {(await response.text())[:300]}"
                elif is_streamed:
                    text = await _read_stream(response, request)
                else:
                    text = (await response.json())["choices"][0]["message"]["content"]
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            request.is_refused = isinstance(error, aiohttp.ClientConnectorError)
            request.failure = f"{type(error).__name__}: {error}"
        request.ended_s = time.monotonic()
        expected = self._references[number]
        if not request.failure:
            request.is_right = text == expected
        elif not expected.startswith(text):
            request.is_right = False  # what came before the failure must be right, too
        return request


async def _read_stream(response: aiohttp.ClientResponse, request: Request) -> str:
    """Return the text of a stream; note a failure in the request."""
    text, is_done = "", False
    async for line in response.content:
        if line.startswith(b"data: [DONE]"):
            is_done = True
        elif line.startswith(b"data: "):
            event = orjson.loads(line.removeprefix(b"data: "))
            if "error" in event:
                request.failure = f"event: {event['error']['message'][:300]}"
                break
            text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    if not is_done and not request.failure:
        request.failure = "the stream ended before [DONE]"
    return text


class Writer:
    """Applies and deletes NodePools one after another, and knows which of them must be there."""

    def __init__(self, fleet: Fleet) -> None:
        self.acknowledged = 0
        self._fleet = fleet
        self._rounds: dict[str, int | None] = {}
        """The acknowledged round of each pool; None once its deletion was acknowledged."""
        self._is_stopping = False

    def stop(self) -> None:
        """End after the write that runs."""
        self._is_stopping = True

    async def run(self) -> None:
        """Write until `stop`."""
        for number in itertools.count():
            name = f"chaos-{number % _POOLS}"
            is_deletion = number // _POOLS % 3 == 2
            while not await self._write(name, number, is_deletion=is_deletion):
                # A write that failed may have been carried out or not: only the next one tells.
                self._rounds.pop(name, None)
                if self._is_stopping:
                    return
                await asyncio.sleep(_RETRY_S)
            if self._is_stopping:
                return

    async def _write(self, name: str, number: int, *, is_deletion: bool) -> bool:
        manifest = _POOL.format(name=name, round=number).encode()
        words = (
            ("delete", f"nodepool/{name}", "--ignore-not-found")
            if is_deletion
            else ("apply", "-f", "-")
        )
        try:
            done = await self._fleet.ctl(
                *words, stdin=b"" if is_deletion else manifest, limit_s=120.0
            )
        except TimeoutError:
            return False
        if done.code == 0:
            self._rounds[name] = None if is_deletion else number
            self.acknowledged += 1
        return done.code == 0

    async def lost(self) -> list[str]:
        """Return what is not as it was acknowledged last."""
        transport = connect(self._fleet.etcd.address)
        try:
            listing = await transport.list(keys.spec_prefix("NodePool"))
        finally:
            await transport.close()
        found: dict[str, int] = {}
        for item in listing.items:
            meta = orjson.loads(item.value)["metadata"]
            if meta["name"].startswith("chaos-"):
                found[meta["name"]] = int(meta["labels"]["round"])
        return [
            f"NodePool {name}: round {found.get(name)}, acknowledged {wanted}"
            for name, wanted in self._rounds.items()
            if found.get(name) != wanted
        ]
