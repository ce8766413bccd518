"""Engines that die, stop, drain and go mad under load, behind our gateway and others: `make bench-gateway-faults`.

Whole answers (50 ms) and streams (64 events, 10 ms apart) are asked for at once, each by as many connections as said, while
one engine of two or three has its fault. Every answer's text is compared with what it must be. `gap` is the longest that
any stream paused, `first` the longest that one took to begin, `slowest` the longest whole answer: what the fault cost. All gateways give a silent engine 1 s.
In the last runs of ours its etcd is dead. The last line is JSON.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop
from tabulate import tabulate

from bench.gateway import loading, ours, outcomes, peers
from bench.gateway.faults_acts import FAULTS, Fault, is_used
from bench.gateway.loading import Load
from bench.gateway.outcomes import Circumstances, Outcome
from bench.gateway.parts import Engine, Programs, compiled, free_port
from bench.gateway.peers import Peer
from bench.gateway.peers_install import install
from bench.result import SMOKE, finish, sized
from schemas.routing import Timeouts

_OPTIONS = ("delay_us=50000", "pace_us=10000", f"tokens={loading.TOKENS}")
_BEFORE_S = 0.7
_FAULTS = sized(FAULTS, smoke=FAULTS[:2])
_CONNECTIONS = sized((16, 64), smoke=(4,))
_SETTLE_S = 15.0
_PATIENCE = Timeouts(attempt="1s", first_token="1s")


@dataclass(frozen=True)
class Setting:
    """One gateway in front of its engines."""

    peer: Peer
    name: str
    engines: Sequence[Engine]
    concurrencies: tuple[int, ...]


async def under_load(programs: Programs, setting: Setting, count: int, fault: Fault) -> Outcome:
    """Load the gateway with both kinds of requests, and have one engine fail meanwhile."""
    seconds = _BEFORE_S + fault.lasts_s + fault.load_after_s
    whole, stream = (
        Load(
            port=setting.peer.port,
            connections=count,
            seconds=seconds,
            is_streamed=is_streamed,
            key=setting.peer.key,
        )
        for is_streamed in (False, True)
    )
    victim = setting.engines[0]
    before = sum(engine.stats().get("resumed", 0) for engine in setting.engines[1:])

    async def act() -> float | None:
        await asyncio.sleep(_BEFORE_S)
        return await fault.act(victim)

    wholes, streams, again_s = await asyncio.gather(
        loading.run(programs, whole), loading.run(programs, stream), act()
    )
    after = sum(engine.stats().get("resumed", 0) for engine in setting.engines[1:])
    during = Circumstances(
        setting=setting.name,
        connections=count,
        fault=fault.name,
        again_s=again_s,
        resumed=int(after - before),
    )
    return outcomes.told(during, wholes, streams)


async def settled(programs: Programs, setting: Setting) -> bool:
    """Repair all engines, and wait until all of them are used again; return whether they are."""
    for engine in setting.engines:
        engine.revive()
    deadline_s = time.monotonic() + _SETTLE_S
    load = Load(
        port=setting.peer.port,
        connections=8,
        seconds=0.2,
        is_streamed=False,
        key=setting.peer.key,
    )
    while time.monotonic() < deadline_s:
        before = [engine.stats().get("served", 0) for engine in setting.engines]
        await loading.run(programs, load)
        if all(is_used(e, was) for e, was in zip(setting.engines, before, strict=True)):
            return True
    return False


async def runs(programs: Programs, setting: Setting) -> AsyncIterator[Outcome]:
    """Yield what each fault does in this setting."""
    for count in setting.concurrencies:
        for fault in _FAULTS:
            if not await settled(programs, setting):
                print(f"{setting.name}: an engine is not used again; what follows is without it")
            outcome = await under_load(programs, setting, count, fault)
            print(outcomes.line(outcome), flush=True)
            yield outcome


@asynccontextmanager
async def engines_running(programs: Programs, count: int) -> AsyncIterator[list[Engine]]:
    engines = [Engine(programs, f"bench-{n}", free_port(), _OPTIONS) for n in range(count)]
    try:
        for engine in engines:
            engine.start()
        yield engines
    finally:
        for engine in engines:
            engine.end()


async def of_ours(programs: Programs, folder: Path, engines: int) -> list[Outcome]:
    """Measure our gateway; with two engines also without its etcd."""
    own = folder / f"ours-{engines}"
    own.mkdir()
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(engines_running(programs, engines))
        gateway = await ours.start(stack, own, {"bench": running}, _PATIENCE)
        peer = Peer("ours", gateway.port, gateway.pid, key=ours.KEY)
        setting = Setting(peer, f"ours, {engines} engines", running, _CONNECTIONS)
        found = [outcome async for outcome in runs(programs, setting)]
        if engines == 2:
            await gateway.etcd.supervisor.stop()
            setting = Setting(peer, "ours, etcd dead", running, _CONNECTIONS[:1])
            found += [outcome async for outcome in runs(programs, setting)]
    return found


async def of_peer(
    programs: Programs, folder: Path, name: str, failed: dict[str, str]
) -> list[Outcome]:
    """Measure another gateway; nothing if it cannot be, which is recorded."""
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(engines_running(programs, 2))
        started, more = await peers.started(stack, folder, running, [name])
        failed |= more
        setting = [Setting(peer, name, running, _CONNECTIONS[:1]) for peer in started]
        return [outcome for one in setting async for outcome in runs(programs, one)]


async def main() -> None:
    """Measure and print."""
    began_s = time.monotonic()
    found: list[Outcome] = []
    others = ("nginx", "haproxy")
    failed = {} if SMOKE else install(others)
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as name:
        folder = Path(name)
        programs = compiled(folder)
        print(f"{os.cpu_count()} cores shared by load, engines, gateway and etcd", flush=True)
        for engines in sized((2, 3), smoke=(2,)):
            found += await of_ours(programs, folder, engines)
        for peer in (name for name in others if name not in failed):
            found += await of_peer(programs, folder, peer, failed)
    totals = outcomes.summary(found)
    rows = [[name, *values.values()] for name, values in totals.items()]
    print(tabulate(rows, headers=["gateway", *next(iter(totals.values()))]))
    mine = outcomes.sums(
        [outcome for outcome in found if outcome.during.setting.startswith("ours")]
    )
    took = {"seconds": round(time.monotonic() - began_s, 1)}
    finish("gateway_faults", mine, {**totals, **took}, failed=failed)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
