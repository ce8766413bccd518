"""Runs the load generator of `native/load.c` and reads its records."""

import asyncio
import math
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from bench.gateway.parts import Programs

TOKENS = 61
EVENTS = TOKENS + 3
"""A stream's: the role, the tokens, the finish, [DONE]."""

OUTCOMES = ("ok", "refused", "truncated", "wrong", "broken", "unreachable", "silent")
"""The values of enum outcome: `broken` ended in order and without [DONE], `wrong` has another text."""

_RECORD = np.dtype(
    [
        ("began_s", "f8"),
        ("first_s", "f8"),
        ("whole_s", "f8"),
        ("gap_s", "f8"),
        ("status", "i4"),
        ("outcome", "i4"),
    ]
)
Records: TypeAlias = npt.NDArray[Any]
"""One a request, as struct record; `began_s` by the clock of time.monotonic()."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """The load on one port."""

    port: int
    connections: int
    is_streamed: bool
    seconds: float = math.inf
    tokens: int | Path = TOKENS
    """The length of the stand-in's answers; or a file of requests with the answers that they must get."""
    key: str = ""
    """An API key, where one is needed."""
    header: str = ""
    """One more line of each head."""
    turns: int = 2
    """1 or 2. Each second request of a connection goes on with the chat of the first, or begins another."""
    has_fresh_heads: bool = False
    """True if no head repeats: each has a request id and a trace parent of its own."""
    silence_s: float | None = None
    """Longest wait for an answer's next byte; None: what the load generator takes for a fault."""
    is_tls: bool = False

    @property
    def options(self) -> tuple[str, ...]:
        values = {"key": self.key, "header": self.header, "silence": self.silence_s}
        given = tuple(f"{name}={value}" for name, value in values.items() if value)
        flags = {"fresh": self.has_fresh_heads, "tls": self.is_tls}
        return (*given, f"turns={self.turns}", *(name for name, is_set in flags.items() if is_set))


class Running:
    """A load that is under way."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def records(self) -> Records:
        """Wait for its end; return what came of every request."""
        output, _ = await self._process.communicate()
        return np.frombuffer(output, dtype=_RECORD)

    async def ended(self) -> Records:
        """Stop the load; return the outcome of every request."""
        self._process.terminate()
        return await self.records()


@asynccontextmanager
async def running(programs: Programs, load: Load) -> AsyncIterator[Running]:
    """Ask until the load's time is over; at the latest until the context is left."""
    mode = "stream" if load.is_streamed else "whole"
    numbers = (load.port, load.connections, load.seconds, mode, load.tokens)
    command = [str(programs.load), *map(str, numbers), *load.options]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    try:
        yield Running(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def run(programs: Programs, load: Load) -> Records:
    """Return what came of every request."""
    async with running(programs, load) as process:
        return await process.records()


def elapsed_s(records: Records) -> float:
    """Return the time from the first request's begin to the last one's end."""
    if not len(records):
        return 0.0
    return float((records["began_s"] + records["whole_s"]).max() - records["began_s"].min())


def counts(records: Records) -> dict[str, int]:
    """Return how many requests ended in each way, those that did."""
    found = np.bincount(records["outcome"], minlength=len(OUTCOMES))
    return {name: int(n) for name, n in zip(OUTCOMES, found, strict=True) if n}
