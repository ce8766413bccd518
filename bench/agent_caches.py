"""A leader, and the caches of many agents in a process of their own, for the benches of agents' watches.

The parent writes a line to the process's standard input, what it waits for and whether the caches read copies or the
whole fleet's objects; the process answers with the CPU seconds that it has used so far, once that is so.
"""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import psutil

from machinery.clock import SystemClock
from nodeagent.kept_copies import ObjectCache
from reconciler.assignments import assignment_keeper
from reconciler.listers.caches import decode_spec
from reconciler.model_uses import model_use_keeper
from store import keys
from store.etcd.member.embedded import EmbeddedEtcd
from store.informer import Informer
from store.leases import Election
from store.port import Transport

LIMIT_S = 120.0
_CLOCK = SystemClock()


async def serve(caches: Sequence[ObjectCache[Any]], have: Callable[[Any, bool], bool]) -> None:
    """Run the caches; answer each line on standard input once `have` is true of it."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(cache.run()) for cache in caches]
        for cache in caches:
            await cache.wait_synced()
        print("{}", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            wanted, is_narrow = json.loads(line)
            while not have(wanted, is_narrow):
                await asyncio.sleep(0.02)
            print(json.dumps({"cpu": time.process_time()}), flush=True)
        for task in tasks:
            task.cancel()


class AgentCaches:
    """The process of the caches, as its parent sees it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def have(self, wanted: object, *, is_narrow: bool) -> float:
        """Wait until the caches have what is wanted; return the CPU seconds of their process so far."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps([wanted, is_narrow])}\n".encode())
        return (await self.answer())["cpu"]

    async def answer(self) -> dict[str, float]:
        """Return what the process says next."""
        assert self._process.stdout is not None
        async with asyncio.timeout(LIMIT_S):
            found: dict[str, float] = json.loads(await self._process.stdout.readline())
        return found


@asynccontextmanager
async def running(module: str, etcd: EmbeddedEtcd) -> AsyncIterator[AgentCaches]:
    """Run the module as the process of the caches, with the arguments of this one and the socket of etcd."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *sys.argv[1:], str(etcd.address.socket)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    caches = AgentCaches(process)
    try:
        await caches.answer()
        yield caches
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


@asynccontextmanager
async def keeping_copies(transport: Transport) -> AsyncIterator[None]:
    """Lead, and keep what agents read below their nodes, until the block ends."""
    specs = Informer(transport, keys.SPEC_PREFIX, decode_spec, _CLOCK)
    copies = assignment_keeper(transport, _CLOCK, specs)
    records = model_use_keeper(transport, _CLOCK, specs)
    copies.connect()
    records.connect()
    election = Election(transport, _CLOCK, key=keys.ELECTION_RECONCILER, ttl_s=60)
    leadership = await election.campaign("bench/1")
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(specs.run())]
        await specs.wait_synced()
        tasks += [group.create_task(one.lead(leadership)) for one in (copies, records)]
        yield
        for task in tasks:
            task.cancel()
    await leadership.resign()


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def medians(
    rounds: Mapping[str, Sequence[Mapping[str, float]]],
) -> dict[str, dict[str, float]]:
    """Return the median of each figure of each way, and print it."""
    found = {
        way: {name: statistics.median(one[name] for one in figures) for name in figures[0]}
        for way, figures in rounds.items()
    }
    for way, figures in found.items():
        print(way, {name: round(one, 2) for name, one in figures.items()}, flush=True)
    return found
