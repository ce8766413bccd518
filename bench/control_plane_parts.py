"""The parts of the benches of the control plane: processes with their cost, and what was heard of the store when."""

import asyncio
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from machinery import processes
from machinery.processes import ChildProcess
from schemas.deployment import ModelDeployment, ModelDeploymentSpec, ModelSource, Resources
from schemas.meta import ObjectMeta
from store.errors import CompactedError, UnavailableError
from store.port import Transport


def deployment(name: str, replicas: int) -> ModelDeployment:
    return ModelDeployment(
        metadata=ObjectMeta(name=name, uid=f"uid-{name}", generation=1),
        spec=ModelDeploymentSpec(
            model=ModelSource(path="model"),
            replicas=replicas,
            context_length=2048,
            concurrency=1,
            resources=Resources(memory="1Gi"),
        ),
    )


class TooSlowError(Exception):
    """This machine cannot do what was to be measured, or something broke; says why in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Use of processes so far: seconds of processor by name, and bytes of memory now."""

    at: float
    cpu_s: dict[str, float]
    machine_s: float
    """Seconds that all processors of the machine were busy, with whomever."""
    rss: dict[str, int]


@dataclass(slots=True, kw_only=True)
class Crowd:
    """Processes of ours, and etcd; each ended with -9 at the end, whatever happened."""

    etcd_flag: str
    folder: Path
    pids: dict[str, int] = field(default_factory=dict)
    children: dict[str, ChildProcess] = field(default_factory=dict)

    def start(self, name: str, *module: str) -> ChildProcess:
        """Start `python -m module` with the store's address."""
        argv = [sys.executable, "-m", *module, "--etcd", self.etcd_flag]
        child = processes.spawn(argv, log=self.folder / f"{name}.log")
        self.children[name], self.pids[name] = child, child.record.pid
        return child

    def kill(self, name: str) -> None:
        """End one with -9."""
        self.children.pop(name).send(signal.SIGKILL)
        del self.pids[name]

    def kill_all(self) -> None:
        for name in tuple(self.children):
            self.kill(name)

    def check(self) -> None:
        """See that everybody is there.

        Raises:
            TooSlowError: somebody ended by itself; with its last words.

        """
        for name, child in self.children.items():
            if not child.running():
                words = processes.last_lines(self.folder / f"{name}.log", 1)
                raise TooSlowError(f"{name} ended by itself: {words or 'it said nothing'}")

    def cost(self) -> Cost:
        """Return what everybody has taken so far.

        Raises:
            TooSlowError: one of them is not there any more.

        """
        cpu, rss = {}, {}
        self.check()
        for name, pid in self.pids.items():
            process = psutil.Process(pid)
            times = process.cpu_times()
            cpu[name] = times.user + times.system
            rss[name] = process.memory_info().rss
        machine = psutil.cpu_times()
        busy = machine.user + machine.system + machine.nice
        return Cost(at=time.perf_counter(), cpu_s=cpu, machine_s=busy, rss=rss)

    async def calm(self, name: str, *, below: float = 0.2, limit_s: float = 30.0) -> None:
        """Wait until a process takes little processor: it has read what it wanted."""
        begin = before = self.cost()
        while before.at - begin.at < limit_s:
            await asyncio.sleep(1.0)
            now = self.cost()
            if (now.cpu_s[name] - before.cpu_s[name]) / (now.at - before.at) < below:
                return
            before = now


def between(before: Cost, after: Cost) -> dict[str, float]:
    """Return the seconds of processor that each took; processes of a kind (NAME-1, NAME-2) are one."""
    found: dict[str, float] = {}
    for name, cpu_s in after.cpu_s.items():
        kind = name.partition("-")[0]
        found[kind] = found.get(kind, 0.0) + cpu_s - before.cpu_s.get(name, 0.0)
    return found


def used(before: Cost, after: Cost) -> dict[str, float]:
    """Return how many processors each took between two moments."""
    return {
        name: round(cpu_s / (after.at - before.at), 3)
        for name, cpu_s in between(before, after).items()
    }


def spent(before: Cost, after: Cost, number: int) -> dict[str, float]:
    """Return the milliseconds of processor that each took for one of so many."""
    found = between(before, after)
    return {name: round(1000 * cpu_s / number, 2) for name, cpu_s in found.items()}


def others(before: Cost, after: Cost) -> float:
    """Return how many processors were busy with what is not ours: then this machine was not quiet."""
    ours = sum(between(before, after).values())
    busy = after.machine_s - before.machine_s - ours
    return round(max(0.0, busy) / (after.at - before.at), 2)


@dataclass(slots=True, kw_only=True)
class Heard:
    """Times of the first write and of the deletion of keys below a prefix, by this process's clock."""

    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    gone: dict[str, float] = field(default_factory=dict)
    values: dict[str, bytes] = field(default_factory=dict)
    writes: int = 0

    async def listen(self, transport: Transport, prefix: str) -> None:
        """Listen for ever, also if the store is slow for a while and the watch breaks."""
        while True:
            with suppress(UnavailableError, CompactedError):
                await self._follow(transport, prefix)
            await asyncio.sleep(0.1)

    async def _follow(self, transport: Transport, prefix: str) -> None:
        """Listen until the watch breaks; what is there already was heard of now."""
        listing = await transport.list(prefix)
        now = time.perf_counter()
        there = {item.key: item.value for item in listing.items}
        for key in self.values.keys() - there.keys():
            self.gone[key] = now
        for key, value in there.items():
            self.first.setdefault(key, now)
            if self.values.get(key) != value:
                self.last[key] = now
        self.values = there
        watch = transport.watch(prefix, after_revision=listing.revision)
        async with aclosing(watch):
            async for batch in watch:
                now = time.perf_counter()
                for change in batch.changes:
                    self.writes += 1
                    if change.now is None:
                        self.gone[change.key] = now
                        self.values.pop(change.key, None)
                        continue
                    self.first.setdefault(change.key, now)
                    self.last[change.key] = now
                    self.values[change.key] = change.now.value


@dataclass(slots=True, kw_only=True)
class Bench:
    """State that every phase needs."""

    transport: Transport
    crowd: Crowd
    replicas: Heard = field(default_factory=Heard)
    endpoints: Heard = field(default_factory=Heard)
    leases: Heard = field(default_factory=Heard)
    ends_at: float = 0.0
    """Deadline of the present phase, by `time.perf_counter`."""

    def within(self, most_s: float) -> float:
        """Return how many seconds may be waited for something: at most so many, and not beyond the phase."""
        return max(0.0, min(most_s, self.ends_at - time.perf_counter()))


async def wait_for(done: Callable[[], bool | Awaitable[bool]], limit_s: float) -> bool:
    """Return whether something came true within the time."""
    end = time.perf_counter() + limit_s
    while time.perf_counter() < end:
        answer = done()
        if answer if isinstance(answer, bool) else await answer:
            return True
        await asyncio.sleep(0.05)
    return False
