"""Clients that stream, and remember what came."""

import asyncio
from dataclasses import dataclass, field

import aiohttp
import orjson


@dataclass(slots=True)
class Stream:
    """One streamed request: what came of it."""

    text: str = ""
    chunks: int = 0
    status: int = 0
    error: str = ""
    is_done: bool = False
    node: str = ""
    attempts: int = 0
    began: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def succeeded(self) -> bool:
        return self.is_done and not self.error


async def stream(url: str, model: str, prompt: str, *, max_tokens: int, into: Stream) -> None:
    """Send one streamed completion; never raises for what the server does."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    timeout = aiohttp.ClientTimeout(total=120)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{url}/v1/completions", json=body) as response,
        ):
            into.status = response.status
            into.node = response.headers.get("x-fleet-node", "")
            into.attempts = int(response.headers.get("x-fleet-attempts", "0"))
            if response.status != 200:
                into.error = await response.text()
                return
            async for line in response.content:
                _take(line, into)
    except (aiohttp.ClientError, TimeoutError) as error:
        into.error = f"{type(error).__name__}: {error}"


def _take(line: bytes, into: Stream) -> None:
    if line.startswith(b"data: [DONE]"):
        into.is_done = True
    elif line.startswith(b"data: "):
        event = orjson.loads(line.removeprefix(b"data: "))
        if "error" in event:
            into.error = event["error"]["message"]
            return
        into.chunks += 1
        into.text += "".join(choice["text"] for choice in event["choices"])
        into.began.set()
