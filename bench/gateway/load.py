"""Stand-in engines and the load generator of the gateway's benches: the programs in `native/`, and what they report."""

import asyncio
import json
import math
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from bench.harness import get, own_core
from tests.support.ports import free_port

TOKENS = 61
EVENTS = TOKENS + 3
"""A stream's: the role, the tokens, the finish, [DONE]."""
OUTCOMES = ("ok", "refused", "truncated", "wrong", "broken", "unreachable", "silent")
"""The values of enum outcome: `broken` ended in order and without [DONE], `wrong` has another text."""
_RECORD = np.dtype(
    [
        *((name, "f8") for name in ("began_s", "first_s", "whole_s", "gap_s")),
        ("status", "i4"),
        ("outcome", "i4"),
    ]
)
Records: TypeAlias = npt.NDArray[Any]
"""One a request, as struct record; `began_s` by the clock of time.monotonic()."""


def compiled(folder: Path) -> Path:
    """Compile both programs into the folder: a generator in Python is slower than what it measures."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise SystemExit("cc is not on PATH; apt install gcc, or xcode-select --install on a Mac")
    for name in ("engine", "load"):
        source = Path(__file__).parent / "native" / f"{name}.c"
        subprocess.run([compiler, "-O2", "-o", str(folder / name), str(source)], check=True)
    return folder


@dataclass
class Engine:
    """A stand-in engine on a port of its own, which may be killed, stopped and made to misbehave."""

    programs: Path
    replica: str
    options: tuple[str, ...] = ()
    _process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.port = free_port()

    def start(self) -> None:
        command = [str(self.programs / "engine"), str(self.port), self.replica, *self.options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline_s = time.monotonic() + 10
        while time.monotonic() < deadline_s:
            with suppress(OSError):
                get(self.port, "/health")
                return
            time.sleep(0.005)
        raise SystemExit(f"the stand-in engine does not answer on port {self.port}")

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def end(self) -> None:
        """Kill it, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def revive(self) -> None:
        """Make it run and behave, after any fault."""
        if self._process is not None and self._process.poll() is None:
            self.signal(signal.SIGCONT)
            self.set("fault/none")
        else:
            self.start()

    def set(self, what: str) -> None:
        """Set `fault/MODE` or `pace/US`."""
        get(self.port, f"/{what}")

    def stat(self, name: str) -> float:
        """Return one of its counts; 0 if it does not answer."""
        try:
            return float(json.loads(get(self.port, "/stats", 0.5)).get(name, 0))
        except OSError:
            return 0.0


def start_engines(
    stack: AsyncExitStack, programs: Path, count: int, *options: str, name: str = "bench"
) -> list[Engine]:
    """Start engines, which end with the stack, beside the core of what is measured."""
    engines = [Engine(programs, f"{name}-{number}", options) for number in range(count)]
    with own_core(is_measured=False):
        for engine in engines:
            stack.callback(engine.end)
            engine.start()
    return engines


@dataclass(frozen=True, kw_only=True)
class Load:
    """The load on one port."""

    port: int
    connections: int
    is_streamed: bool = False
    seconds: float = math.inf
    key: str = ""
    """An API key, where one is needed."""
    turns: int = 2
    """1 or 2. Each second request of a connection goes on with the chat of the first, or begins another."""
    has_fresh_heads: bool = False
    """True if no head repeats: each has a request id and a trace parent of its own."""
    silence_s: float = 0.0
    """Longest wait for an answer's next byte; 0: what the load generator takes for a fault."""

    @asynccontextmanager
    async def running(self, programs: Path) -> AsyncIterator[Callable[[], Any]]:
        """Send requests until the load's time is over, at the latest until the context ends; yield what awaits the records."""
        mode = "stream" if self.is_streamed else "whole"
        words = [str(self.port), str(self.connections), str(self.seconds), mode, str(TOKENS)]
        words += [f"turns={self.turns}", *(["fresh"] if self.has_fresh_heads else [])]
        words += [f"key={self.key}"] if self.key else []
        words += [f"silence={self.silence_s}"] if self.silence_s else []
        command = [str(programs / "load"), *words]
        with own_core(is_measured=False):
            process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)

        async def records() -> Records:
            output, _ = await process.communicate()
            return np.frombuffer(output, dtype=_RECORD)

        try:
            yield records
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def run(self, programs: Path) -> Records:
        """Return what came of every request."""
        async with self.running(programs) as records:
            result: Records = await records()
            return result


def counts(records: Records) -> dict[str, int]:
    """Return how many requests ended in each way, those that did."""
    numbers = np.bincount(records["outcome"], minlength=len(OUTCOMES))
    return {name: int(n) for name, n in zip(OUTCOMES, numbers, strict=True) if n}
