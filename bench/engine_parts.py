"""Parts of `bench.engine`: the two servers, a client that notes when tokens come, and prompts."""

import asyncio
import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from bench.engine_start import free_port, start_engine, theirs
from bench.result import of_peer

Json = dict[str, Any]
_READY_S = 90.0
_FIELDS = {"context_length": 4096, "concurrency": 32}
_WORDS = "time year people way day man thing woman life child world school state family group hand"


@dataclass(slots=True, kw_only=True)
class Server:
    """One of the two, running."""

    name: str
    model: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    def blamed(self) -> AbstractContextManager[None]:
        """Return a context in which the peer's failures are its own, and ours are errors of the bench."""
        return nullcontext() if self.name == "ours" else of_peer()

    @property
    def cpu_s(self) -> float:
        """Of all its threads, since it began."""
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    @property
    def rss_mb(self) -> float:
        return psutil.Process(self.process.pid).memory_info().rss / 1e6


@dataclass(slots=True)
class Reply:
    """Times of the pieces of one answer, in seconds from the request."""

    times: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """Figures of several requests at once."""

    wall_s: float
    cpu_s: float
    replies: list[Reply]

    @property
    def tokens_per_s(self) -> float:
        return sum(reply.tokens for reply in self.replies) / self.wall_s

    @property
    def tokens_per_cpu_s(self) -> float:
        return sum(reply.tokens for reply in self.replies) / self.cpu_s

    @property
    def ttft_p50(self) -> float:
        return statistics.median(reply.times[0] for reply in self.replies)

    def gap_p99(self, skip: int = 0) -> float:
        """Return the 99th percentile of the seconds between two pieces of one answer."""
        gaps = sorted(
            after - before
            for reply in self.replies[skip:]
            for before, after in zip(reply.times, reply.times[1:], strict=False)
        )
        return gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))]


def prompt(rng: random.Random, words: int) -> str:
    """Return so many words, about a token each."""
    return " ".join(rng.choice(_WORDS.split()) for _ in range(words))


def body(server: Server, text: str, tokens: int, **more: Any) -> Json:
    """Return a chat request that greedily makes so many tokens and is streamed."""
    return {
        "model": server.model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }


async def ask(session: aiohttp.ClientSession, server: Server, request: Json) -> Reply:
    """Send one request; note when each piece of text came."""
    with server.blamed():
        return await _streamed(session, server, request)


async def _streamed(session: aiohttp.ClientSession, server: Server, request: Json) -> Reply:
    reply, began = Reply(), time.perf_counter()
    url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
    async with session.post(url, json=request) as response:
        if response.status != 200:
            reply.error = (await response.text())[:200]
            raise RuntimeError(f"{server.name}: {response.status} {reply.error}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("usage"):
                reply.tokens = event["usage"]["completion_tokens"]
            if any(_shows(choice) for choice in event.get("choices", ())):
                reply.times.append(time.perf_counter() - began)
    return reply


def _shows(choice: Json) -> bool:
    delta = choice.get("delta", {})
    return bool(delta.get("content") or delta.get("reasoning"))


async def burst(server: Server, requests: Sequence[Json]) -> Burst:
    """Send these at once and wait for all."""
    timeout = aiohttp.ClientTimeout(total=280)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        cpu, began = server.cpu_s, time.perf_counter()
        replies = await asyncio.gather(*(ask(session, server, request) for request in requests))
        return Burst(
            wall_s=time.perf_counter() - began, cpu_s=server.cpu_s - cpu, replies=list(replies)
        )


@asynccontextmanager
async def serving(model: Path, library: Path | None) -> AsyncIterator[tuple[Server, Server]]:
    """Run an engine and `mlx_lm.server` on the same folder, with the same BLAS."""
    servers = [_begun("ours", model, None), _begun("mlx_lm", model, library)]
    try:
        for server, path in zip(servers, ("/ready", "/health"), strict=True):
            with server.blamed():
                await _ready(server, path)
        yield servers[0], servers[1]
    finally:
        for server in servers:
            server.process.terminate()
        for server in servers:
            server.process.wait()


def _begun(name: str, model: Path, library: Path | None) -> Server:
    """Start a server; its words go to a file beside the model."""
    port, hub = free_port(), model.parent / "hub"
    hub.mkdir(exist_ok=True)  # mlx_lm.server wants one, if only to find nothing in it
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
    environment |= {"HF_HUB_CACHE": str(hub)}
    environment |= {} if library is None else {"LD_PRELOAD": str(library)}
    log = model.parent / f"{name}-{model.name}.log"
    with log.open("wb") as words:
        options: dict[str, Any] = {"env": environment, "stdout": words, "stderr": subprocess.STDOUT}
        process = (
            start_engine(model, port, fields=_FIELDS, **options)
            if name == "ours"
            else subprocess.Popen(theirs(model, port), **options)
        )
    served = "bench" if name == "ours" else str(model)
    return Server(name=name, model=served, port=port, process=process, log=log)


async def _ready(server: Server, path: str) -> None:
    began = time.perf_counter()
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"http://127.0.0.1:{server.port}{path}") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            if server.process.poll() is not None or time.perf_counter() - began > _READY_S:
                words = server.log.read_text(errors="replace").strip().splitlines()
                raise RuntimeError(f"{server.name} did not start: {' | '.join(words[-2:])}")
            await asyncio.sleep(0.1)
