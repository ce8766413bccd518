"""The faults of `bench.gateway.faults`: what happens to an engine, and until when it is used again."""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from bench.gateway.outcomes import NEVER
from bench.gateway.parts import Engine

_AGAIN_S = 5.0


@dataclass(frozen=True)
class Fault:
    """Something that happens to one engine for a while."""

    name: str
    lasts_s: float
    act: Callable[[Engine], Awaitable[float | None]]
    """Do it and undo it; returns the seconds from then to the engine's next request, None if nothing was done."""
    load_after_s: float = 1.2
    """Seconds for which the load goes on after the fault."""


def is_used(engine: Engine, before: float) -> bool:
    """Return whether it got requests since it had served so many; a restarted one begins at 0."""
    served = engine.stats().get("served", 0)
    return served > before or (served < before and served > 0)


async def used_again(engine: Engine) -> float:
    """Return the seconds until the engine gets a request; NEVER if it gets none."""
    began_s, served = time.monotonic(), engine.stats().get("served", 0)
    while time.monotonic() < began_s + _AGAIN_S:
        if engine.stats().get("served", 0) > served:
            return time.monotonic() - began_s
        await asyncio.sleep(0.01)
    return NEVER


async def _started_again(engine: Engine) -> float:
    engine.start()
    ready_s = time.monotonic()
    while time.monotonic() < ready_s + _AGAIN_S:
        first_s = engine.stats().get("first_s", 0)
        if first_s:
            return max(0.0, first_s - ready_s)
        await asyncio.sleep(0.01)
    return NEVER


async def _nothing(_: Engine) -> None:
    return None


async def _kill(engine: Engine) -> float:
    engine.end()
    await asyncio.sleep(1.0)
    return await _started_again(engine)


async def _stop(engine: Engine) -> float:
    engine.signal(signal.SIGSTOP)
    await asyncio.sleep(2.5)
    engine.signal(signal.SIGCONT)
    return await used_again(engine)


async def _drain(engine: Engine) -> float:
    engine.signal(signal.SIGTERM)
    if not await asyncio.to_thread(engine.wait, 3.0):
        raise SystemExit("the stand-in engine does not end after SIGTERM")
    await asyncio.sleep(0.3)
    return await _started_again(engine)


def _mad(mode: str, seconds: float) -> Callable[[Engine], Awaitable[float]]:
    async def act(engine: Engine) -> float:
        engine.set(f"fault/{mode}")
        await asyncio.sleep(seconds)
        engine.set("fault/none")
        return await used_again(engine)

    return act


FAULTS = (
    Fault("none", 0.3, _nothing),
    Fault("kill", 1.0, _kill),
    Fault("stop", 2.5, _stop),
    Fault("drain", 1.2, _drain),
    # Health checks are answered meanwhile, so one request is tried during the fault, and the next 1.5 to 2.5 s later.
    Fault("blackhole", 2.5, _mad("blackhole", 2.5), load_after_s=4.0),
    Fault("garbage", 0.8, _mad("garbage", 0.8)),
    Fault("half", 0.8, _mad("half", 0.8)),
    Fault("length", 0.8, _mad("length", 0.8)),
)
