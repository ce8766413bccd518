"""Random kills of a whole fleet under load: `make bench-chaos` (SECONDS=300: longer).

etcd, three agents with one real engine each, two reconcilers and a gateway serve streams and whole answers, while a writer
applies and deletes objects. Every two or three seconds one process is killed (kill -9), or stopped and continued later; a
killed process starts again a second later, an engine by its agent. All requests are greedy, and every text is compared with
what an undisturbed engine answers. At the end the faults stop, and all must converge.

A failed request is `held by the gateway` if the gateway was down or stopped while it ran, `refused` if it was not even
connected then, and `no engine` if no engine served for as long as requests wait. Any other failure is `unexplained`. The last line is JSON; the exit code is 1 if a text was wrong, an
acknowledged write was lost, a failure is unexplained, or the fleet did not converge.
"""

import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import uvloop
from tabulate import tabulate

from bench.chaos_clients import MODEL, Clients, Request, Writer, reference_texts
from bench.harness import finish, sized
from nodeagent.engines.engine_processes import EngineProcess, find_engines
from store import keys
from store.errors import StoreError
from store.etcd.connect import connect
from tests.support.commands import run_module
from tests.support.fleet import Fleet, running_fleet
from tests.support.waiting import until_async

_SECONDS = sized(float(os.environ.get("SECONDS", "150")), smoke=10.0)
_NODES = 3
_STREAMS, _WHOLES = sized((24, 6), smoke=(4, 2))
_PAUSE_S = (2.0, 3.0)
"""The time between two faults."""
_STOPPED_S = (1.0, 4.0)
_AGAIN_S = 1.0
_CONVERGED_S = 120.0
_PATIENCE_S = 9.0
"""Requests wait 10 s for an engine (`queueing.coldStart`, and resumption); samples are a second apart on a busy machine."""
_GATEWAY_STARTS_S = 60.0
_SAMPLE_S = 0.25
_LAST_REQUESTS = 12
ENGINES, ETCD, GATEWAY = "engines", "etcd", "gateway"
HELD, REFUSED = "held by the gateway", "refused"
_OTHERS = (
    *(f"node-{n}" for n in range(1, _NODES + 1)),
    "reconciler",
    "reconciler-2",
    GATEWAY,
    ETCD,
)
_RECONCILER_FLAGS = ("--node-grace-period", "10", "--api-port", "0")


_MANIFEST = f"""
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {{name: {MODEL}}}
spec: {{model: {{path: {MODEL}}}, replicas: {_NODES}, contextLength: 512, concurrency: 32}}
"""


def engines_of(fleet: Fleet) -> list[EngineProcess]:
    """Return all engine processes of the fleet."""
    folders = [fleet.root / f"node-{number}" / "engines" for number in range(1, _NODES + 1)]
    return [engine for folder in folders for engine in find_engines(folder)]


@dataclass
class Timeline:
    """States of gateway and engines over time, by the monotonic clock in seconds."""

    gateway_down: list[tuple[float, float]] = field(default_factory=list)
    """Times in which the gateway was dead, starting or stopped."""
    served: list[float] = field(default_factory=list)
    """Times at which at least one engine served and was published."""

    def reason(self, request: Request) -> str:
        """Return the reason of a request's failure; empty if there is none."""
        if any(
            begin <= request.ended_s and request.began_s <= end for begin, end in self.gateway_down
        ):
            return REFUSED if request.is_refused else HELD
        if not any(request.ended_s - _PATIENCE_S <= at <= request.ended_s for at in self.served):
            return "no engine"
        return ""


@dataclass
class Chaos:
    """A fleet under faults."""

    fleet: Fleet
    timeline: Timeline = field(default_factory=Timeline)
    faults: Counter[str] = field(default_factory=Counter)
    _random: random.Random = field(
        default_factory=lambda: random.Random(os.environ.get("SEED", "1"))
    )
    _busy: set[str] = field(default_factory=set)
    """Processes that are down or stopped now."""

    async def run(self, seconds: float) -> None:
        """Cause faults for so long; return once each is undone."""
        until_s = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            while time.monotonic() < until_s:
                target = ENGINES if self._random.random() < 0.3 else self._random.choice(_OTHERS)
                is_stop = self._random.random() < 0.35
                if target == ENGINES:
                    group.create_task(self._engine_fault(is_stop=is_stop))
                elif target not in self._busy:
                    group.create_task(self._fault(target, is_stop=is_stop))
                await asyncio.sleep(self._random.uniform(*_PAUSE_S))

    async def _engine_fault(self, *, is_stop: bool) -> None:
        engines = await asyncio.to_thread(engines_of, self.fleet)
        if not engines:
            return
        engine = self._random.choice(engines)
        self.faults[f"{'stop' if is_stop else 'kill'} {ENGINES}"] += 1
        engine.child.send(signal.SIGSTOP if is_stop else signal.SIGKILL)
        if is_stop:
            await asyncio.sleep(self._random.uniform(*_STOPPED_S))
            engine.child.send(signal.SIGCONT)

    async def _fault(self, target: str, *, is_stop: bool) -> None:
        self.faults[f"{'stop' if is_stop else 'kill'} {target}"] += 1
        self._busy.add(target)
        began_s = time.monotonic()
        try:
            if is_stop:
                await self._stop(target)
            elif target == ETCD:
                await self.fleet.kill_etcd()
                await asyncio.sleep(_AGAIN_S)
                await self.fleet.etcd.start()
            else:
                self.fleet.kill(target)
                await self.fleet.ended(target)
                await asyncio.sleep(_AGAIN_S)
                self.fleet.restart(target)
            if target == GATEWAY:
                await until_async(self._listens, limit_s=_GATEWAY_STARTS_S, what="the gateway")
        finally:
            self._busy.discard(target)
            if target == GATEWAY:
                self.timeline.gateway_down.append((began_s, time.monotonic()))

    async def _stop(self, target: str) -> None:
        pid = self.fleet.etcd.supervisor.pid if target == ETCD else self.fleet.pid(target)
        if pid is None:
            return
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(self._random.uniform(*_STOPPED_S))
        os.kill(pid, signal.SIGCONT)

    async def _listens(self) -> bool:
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session,
                session.get(f"{self.fleet.url}/health"),
            ):
                return True
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def sample(self) -> None:
        """Note forever whether an engine serves that is published."""
        published: frozenset[str] = frozenset()
        timeout = aiohttp.ClientTimeout(total=1)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                if ETCD not in self._busy:  # else what was published stays so
                    with_store = await _published(self.fleet)
                    published = published if with_store is None else with_store
                engines = await asyncio.to_thread(engines_of, self.fleet)
                urls = [e.address.http_url for e in engines if e.replica in published]
                if any(await asyncio.gather(*(_serves(session, url) for url in urls))):
                    self.timeline.served.append(time.monotonic())
                await asyncio.sleep(_SAMPLE_S)


async def _published(fleet: Fleet) -> frozenset[str] | None:
    """Return the replicas with an endpoint; None if the store does not answer."""
    try:
        async with asyncio.timeout(3):
            return frozenset(await fleet.endpoints())
    except (StoreError, TimeoutError):  # etcd is killed and stopped meanwhile
        return None


async def is_whole(fleet: Fleet) -> bool:
    """Return whether there are as many engines as declared, all of them serve, and the gateway knows."""
    engines = await asyncio.to_thread(engines_of, fleet)
    if len(engines) != _NODES:
        return False
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        if not all([await _serves(session, engine.address.http_url) for engine in engines]):
            return False
        try:
            async with session.get(f"{fleet.url}/health") as response:
                health = await response.json()
        except (aiohttp.ClientError, TimeoutError):
            return False
    return bool(health.get("models", {}).get(MODEL, {}).get("ready") == _NODES)


async def _serves(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/ready") as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


async def leftovers(fleet: Fleet, engines: int) -> list[str]:
    """Return what is there that must not be, or is missing, once all has converged."""
    transport = connect(fleet.etcd.address)
    wanted = {
        keys.ENDPOINT_PREFIX: _NODES,
        keys.NODE_LEASE_PREFIX: _NODES,
        keys.GATEWAY_LEASE_PREFIX: 1,
        keys.RECONCILER_LEASE_PREFIX: 2,
        keys.TICKET_PREFIX: 0,
    }
    try:
        counts = {prefix: len((await transport.list(prefix)).items) for prefix in wanted}
    finally:
        await transport.close()
    wrong = [
        f"{prefix}: {counts[prefix]}, not {n}"
        for prefix, n in wanted.items()
        if counts[prefix] != n
    ]
    return wrong + ([] if engines == _NODES else [f"engines: {engines}, not {_NODES}"])


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Fleet]:
    """Run the fleet until its three engines serve."""
    async with running_fleet(
        folder / "fleet", folder / "models", nodes=_NODES, grace_s=10.0
    ) as fleet:
        fleet.start("reconciler-2", "reconciler", *_RECONCILER_FLAGS)
        await fleet.applied(_MANIFEST)
        await until_async(lambda: is_whole(fleet), limit_s=_CONVERGED_S, what="three engines")
        yield fleet


async def converged(fleet: Fleet) -> float | None:
    """Return the seconds until all is as declared; None if it is not in time."""
    began_s = time.monotonic()

    async def is_clean() -> bool:
        if await _published(fleet) is None or not await is_whole(fleet):
            return False
        return not await leftovers(fleet, len(engines_of(fleet)))

    try:
        await until_async(is_clean, limit_s=_CONVERGED_S, what="convergence", every_s=0.5)
    except AssertionError:
        return None
    return round(time.monotonic() - began_s, 1)


def judged(requests: Sequence[Request], timeline: Timeline) -> tuple[Counter[str], list[Request]]:
    """Return the number of requests by their end, and those whose failure has no reason."""
    counts: Counter[str] = Counter()
    unexplained: list[Request] = []
    for request in requests:
        if request.is_right is not None:
            counts["right" if request.is_right else "wrong text"] += 1
            continue
        reason = timeline.reason(request)
        counts[reason or "unexplained"] += 1
        if not reason:
            unexplained.append(request)
    return counts, unexplained


async def main() -> int:
    """Run; return the exit code."""
    own = asyncio.current_task()
    assert own is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, own.cancel)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet-chaos-")))
        await run_module("tests.support.tiny_model", str(folder / "models" / "tiny"), "--endless")
        fleet = await stack.enter_async_context(serving(folder))
        engine = engines_of(fleet)[0]
        references = await reference_texts(engine.address.http_url)
        chaos, writer = Chaos(fleet), Writer(fleet)
        clients = Clients(fleet.url, references)
        async with asyncio.TaskGroup() as group:
            sampling = group.create_task(chaos.sample())
            load = [
                group.create_task(clients.run(is_streamed=n < _STREAMS))
                for n in range(_STREAMS + _WHOLES)
            ]
            writing = group.create_task(writer.run())
            await chaos.run(_SECONDS)
            converged_s = await converged(fleet)
            clients.stop()
            writer.stop()
            await asyncio.gather(*load, writing)
            sampling.cancel()
        last = [await clients.ask(n, is_streamed=bool(n % 2)) for n in range(_LAST_REQUESTS)]
        end = End(
            converged_s=converged_s,
            lost=await writer.lost(),
            leftovers=await leftovers(fleet, len(engines_of(fleet))),
            right_after=sum(request.is_right is True for request in last),
        )
    return report(chaos, clients, writer, end)


@dataclass(frozen=True)
class End:
    """The state of the fleet after the faults."""

    converged_s: float | None
    lost: Sequence[str]
    """Acknowledged writes that are not there."""
    leftovers: Sequence[str]
    right_after: int
    """Right answers of the last requests, of which there are `_LAST_REQUESTS`."""

    @property
    def is_good(self) -> bool:
        """True if nothing is wrong."""
        is_clean = not self.lost and not self.leftovers
        return is_clean and self.converged_s is not None and self.right_after == _LAST_REQUESTS


def report(chaos: Chaos, clients: Clients, writer: Writer, end: End) -> int:
    """Print what happened; return the exit code."""
    counts, unexplained = judged(clients.done, chaos.timeline)
    right = [request for request in clients.done if request.is_right]
    print(tabulate(sorted(chaos.faults.items()), headers=["fault", "times"]))
    print(tabulate(counts.most_common(), headers=["requests", "number"]))
    for request in unexplained[:20]:
        print(f"unexplained: {request}")
    for text in (*end.lost, *end.leftovers):
        print(f"wrong at the end: {text}")
    finish(
        "chaos",
        {
            "right": counts["right"],
            "wrong_texts": counts["wrong text"],
            "unexplained": len(unexplained),
        },
        {
            "faults": sum(chaos.faults.values()),
            "held_by_gateway": counts[HELD],
            "refused_without_gateway": counts[REFUSED],
            "slowest_right_s": round(max((request.lasted_s for request in right), default=0.0), 1),
            "without_engine": counts["no engine"],
            "writes_acknowledged": writer.acknowledged,
            "writes_lost": len(end.lost),
            "converged_s": end.converged_s,
            "leftovers": list(end.leftovers),
            "right_after": end.right_after,
            "fault_seconds": _SECONDS,
        },
    )
    return 0 if end.is_good and not counts["wrong text"] and not unexplained else 1


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(main()))
