"""Memory of streams that wait for their next token: as many as fit, on a gateway that was just started."""

import asyncio
import math
import resource
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from bench.gateway import loading, ours, peers
from bench.gateway.parts import Engine, Programs, free_port, own_core, rss_mb
from bench.gateway.peers import Peer
from bench.gateway.workloads import KINDS, STREAM
from bench.result import PeerError, recorded

_PATIENCE_S = 60
_OPEN_S = 30.0
_WARM_S, _SETTLE_S = 0.3, 0.5
# A proxy has two files for each stream, and some of its own.
_OWN_FILES = 500


def most() -> int:
    """Return how many streams a gateway can hold, and let the processes that are started have their files."""
    limit = peers.open_files()
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    return (limit - _OWN_FILES) // 2


async def measure(
    programs: Programs, folder: Path, names: Sequence[str], count: int, failed: dict[str, str]
) -> dict[str, float]:
    """Return the KiB of each stream by peer; ours is one; record why others could not be measured."""
    found = {}
    for name in names:
        async with AsyncExitStack() as stack:
            own = folder / f"idle-{name.replace(' ', '-')}"
            own.mkdir()
            with own_core(is_gateway=False):
                # The role, and then nothing for as long as this lasts.
                options = (f"pace_us={_PATIENCE_S * 1_000_000}",)
                engines = [Engine(programs, f"idle-{n}", free_port(), options) for n in range(2)]
                for engine in engines:
                    stack.callback(engine.end)
                    engine.start()
            with recorded(failed, f"{name}, idle streams"):
                peer = await _started(stack, own, engines, name)
                found[name] = await _each_kib(programs, peer, engines, count)
    return found


async def _started(
    stack: AsyncExitStack, folder: Path, engines: Sequence[Engine], name: str
) -> Peer:
    if name == "ours":
        gateway = await ours.start(stack, folder, {"bench": engines}, concurrency=1 << 16)
        return Peer(name, gateway.port, gateway.pid, key=ours.KEY)
    started, failed = await peers.started(stack, folder, engines, [name], _PATIENCE_S)
    if not started:
        raise PeerError(failed[name])
    return started[0]


async def _each_kib(programs: Programs, peer: Peer, engines: Sequence[Engine], count: int) -> float:
    """Open the streams; return what each of them takes."""
    with own_core(is_gateway=False):
        await loading.run(programs, KINDS[0].load(peer, _WARM_S))
        before_mb = rss_mb(peer.pid)
        load = replace(STREAM.load(peer, math.inf), connections=count, silence_s=float(_PATIENCE_S))
        async with loading.running(programs, load):
            opened = await _opened(engines, count)
            if opened < count:
                print(f"{peer.name}: {opened} of {count} idle streams opened", flush=True)
            if opened < count / 2:
                raise PeerError(f"{opened} of {count} streams are open after {_OPEN_S:g} s")
            await asyncio.sleep(_SETTLE_S)
            return (rss_mb(peer.pid) - before_mb) * 1e6 / opened / 1024


async def _opened(engines: Sequence[Engine], count: int) -> int:
    """Wait until so many streams are open, or no more will be; return how many."""
    deadline_s = time.monotonic() + _OPEN_S
    while True:
        opened = int(sum(engine.stats().get("in_flight", 0) for engine in engines))
        if opened >= count or time.monotonic() > deadline_s:
            return opened
        await asyncio.sleep(0.1)
