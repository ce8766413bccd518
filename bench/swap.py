"""Many models on few Macs: `make bench-swap`. The real reconciler in virtual time; engines, gateways and requests are
simulated.

Twelve models, room for four. Three traces of requests: the day of a team, agents, random. Counts how often models are
loaded beside the best possible order, which knows the future (Belady), and checks what must hold at every moment.
For requests in no order, the three most popular models always loaded and one that changes need 1.2 times as many.
"""

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Final, NamedTuple

from tabulate import tabulate

from bench.harness import finish, sized
from reconciler.deployments.demand.gateway_metrics import DemandTotals, GatewaySample, VersionSample
from reconciler.deployments.execute import Executor
from reconciler.deployments.reconcile import LeaderState
from reconciler.groups.fabric_checks import FabricCheckView
from reconciler.listers.caches import make_caches
from reconciler.listers.lister import Lister
from reconciler.nodes.liveness import NodeLiveness
from reconciler.nodes.node_views import NodeViewCache
from reconciler.placement.load_times import load_s
from reconciler.placement.swap import residence_s
from reconciler.reconcile import Reconciler
from schemas.autoscaling import Autoscaling
from schemas.meta import ObjectKey
from schemas.node import ModelReport
from schemas.replica import Replica
from store import codec, keys
from store.events import EventRecorder
from store.memory import MemoryTransport
from store.port import CreateRevisionGuard, Delete, Operation, Put
from tests.support.clock import FakeClock
from tests.support.reconciler_agents import (
    node_status,
    put_endpoint,
    put_lease,
    put_node,
    put_rank,
)
from tests.support.reconciler_world import following
from tests.support.world import GEOMETRY, GIB, deployment

MODELS: Final = 12
ROOM: Final = 4
HOURS: Final = sized(3.0, smoke=0.25)
SEEDS: Final = sized(8, smoke=1)
_WEIGHTS = 16 * GIB
_DISK_GBPS = 2.0
LOAD_S: Final = load_s(_WEIGHTS, _DISK_GBPS)
# What a gateway waits for a model that starts (--hold-timeout).
HOLD_S: Final = 120.0


class Request(NamedTuple):
    """One request of a trace."""

    at_s: float
    model: int
    takes_s: float


Trace = list[Request]


def team_day(dice: random.Random, seconds: float) -> Trace:
    """Return the day of ten people: each has two models, works in sessions of 25 minutes, and tries others at times."""
    trace = []
    popularity = [1 / (model + 1) for model in range(MODELS)]
    for _ in range(10):
        first, second = dice.choices(range(MODELS), popularity, k=2)
        at_s = dice.uniform(0, seconds / 8)
        while at_s < seconds:
            other = dice.randrange(MODELS)
            model = dice.choices((first, second, other), (0.75, 0.2, 0.05))[0]
            end_s = at_s + dice.expovariate(1 / 1500)
            while at_s < min(end_s, seconds):
                trace.append(Request(at_s, model, dice.uniform(2, 20)))
                at_s += dice.expovariate(1 / 45)
            at_s += dice.expovariate(1 / 1800)
    return sorted(trace)


def agents(dice: random.Random, seconds: float) -> Trace:
    """Return the requests of three agents: each works with one model for up to an hour, and asks another at times."""
    trace = []
    for _ in range(3):
        at_s = dice.uniform(0, 600)
        while at_s < seconds:
            model, other = dice.randrange(MODELS), dice.randrange(MODELS)
            end_s = at_s + dice.uniform(1200, 3600)
            while at_s < min(end_s, seconds):
                takes_s = dice.uniform(5, 25)
                trace.append(Request(at_s, other if dice.random() < 0.03 else model, takes_s))
                at_s += takes_s + dice.uniform(1, 30)
            at_s += dice.uniform(60, 900)
    return sorted(trace)


def at_random(dice: random.Random, seconds: float) -> Trace:
    """Return requests without any order: one a minute, each for a model by its popularity."""
    trace, at_s = [], 0.0
    popularity = [1 / (model + 1) for model in range(MODELS)]
    while (at_s := at_s + dice.expovariate(1 / 60)) < seconds:
        trace.append(Request(at_s, dice.choices(range(MODELS), popularity)[0], dice.uniform(2, 20)))
    return trace


TRACES: Final[dict[str, Callable[[random.Random, float], Trace]]] = {
    "team": team_day,
    "agents": agents,
    "random": at_random,
}


def fewest_loads(models: Sequence[int], room: int) -> int:
    """Return how often models are loaded in the best possible order: what is used last makes room (Belady)."""
    never = len(models)
    upcoming: list[int] = []
    following_use: dict[int, int] = {}
    for at in range(len(models) - 1, -1, -1):
        upcoming.append(following_use.get(models[at], never))
        following_use[models[at]] = at
    loaded: dict[int, int] = {}
    loads = 0
    for model, next_use in zip(models, reversed(upcoming), strict=True):
        if model not in loaded:
            loads += 1
            if len(loaded) == room:
                del loaded[max(loaded, key=lambda name: loaded[name])]
        loaded[model] = next_use
    return loads


@dataclass(kw_only=True)
class Outcome:
    """Counts of one replay."""

    requests: int
    fewest: int
    """Loads in the best possible order."""
    loads: int = 0
    failed: int = 0
    """Requests that waited for longer than a gateway holds them."""
    cut: int = 0
    """Requests whose replica was told to end while it worked on them."""
    over_memory: int = 0
    """Moments in which a Mac's replicas had more memory than it has."""
    too_early: int = 0
    """Replicas that ended within their minimum residence."""
    longest_wait_s: float = 0.0
    waits: list[float] = field(default_factory=list)
    messages: set[str] = field(default_factory=set)
    """Messages of the condition Placed while a request waited."""


class _Fleet:
    """Two Macs with room for two models each, and the leading reconciler, in virtual time."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.store = MemoryTransport(self.clock)
        self.caches = make_caches(self.store, self.clock)
        self.lister = Lister(self.caches)
        self.totals = DemandTotals()
        self.due: dict[str, float] = {}
        """Times at which to reconcile deployments."""

    async def begin(self) -> None:
        """Write the Macs and the deployments, and lead."""
        term = await self.store.commit([], [Put(key=keys.ELECTION_RECONCILER, value=b"me")])
        fence = CreateRevisionGuard(key=keys.ELECTION_RECONCILER, create_revision=term)
        state = LeaderState(
            liveness=NodeLiveness(30),
            nodes=NodeViewCache(),
            demand=self.totals,
            waiting_for_room=set(),
        )
        self.reconciler = Reconciler(
            self.lister,
            state,
            Executor(self.store, self.clock, lambda: fence),
            EventRecorder(self.store, self.clock, source="reconciler"),
            self.clock,
            fabric=lambda _: FabricCheckView(),
        )
        geometry = GEOMETRY.model_copy(update={"weights_bytes": _WEIGHTS})
        names = [name_of(model) for model in range(MODELS)]
        reports = tuple(ModelReport(path=name, geometry=geometry) for name in names)
        update = {"models": reports, "disk_read_gbps": _DISK_GBPS}
        for name in "ab":
            status = node_status(name, memory_gib=41).model_copy(update=update)
            await self.write(put_node(name, status), put_lease(name))
        scaling = Autoscaling(min_replicas=0, max_replicas=1, idle_time="24h")
        for name in names:
            spec = deployment(
                name=name, path=name, replicas=0, memory="20Gi", concurrency=16, autoscaling=scaling
            )
            await self.write(codec.put_spec(spec))
            self.due[name] = 0.0

    async def write(self, *operations: Operation) -> None:
        """Write, and wait until the caches show it."""
        revision = await self.store.commit([], operations)
        for operation in operations:
            for informer, prefix in (
                (self.caches.specs, keys.SPEC_PREFIX),
                (self.caches.statuses, keys.STATUS_PREFIX),
                (self.caches.ranks, keys.RANK_PREFIX),
                (self.caches.leases, keys.NODE_LEASE_PREFIX),
                (self.caches.endpoints, keys.ENDPOINT_PREFIX),
            ):
                if operation.key.startswith(prefix):
                    await informer.reached(revision)

    async def reconcile(self) -> None:
        """Reconcile what is due."""
        while names := [name for name, at_s in self.due.items() if at_s <= self.clock.monotonic()]:
            for name in names:
                del self.due[name]
                again = await self.reconciler.reconcile(ObjectKey("ModelDeployment", name))
                # The cache has the status that the next decision reads.
                await asyncio.sleep(0)
                if again is not None:
                    self.due[name] = self.clock.monotonic() + again.after_s


def name_of(model: int) -> str:
    """Return the name of a model and of its deployment."""
    return f"m{model:02}"


@dataclass
class _Load:
    """Requests of one model, at gateways and engines."""

    waiting: list[Request] = field(default_factory=list)
    busy_until_s: list[float] = field(default_factory=list)
    finished: int = 0
    reported: tuple[int, int, int] = (0, 0, 0)


class Simulation:
    """Replays a trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._fleet = _Fleet()
        self._loads: defaultdict[str, _Load] = defaultdict(_Load)
        self._ready: dict[str, tuple[Replica, float]] = {}
        """Replicas that serve, by deployment, and since when."""
        self._loading: dict[str, float] = {}
        """Times at which engines are ready, by the uid of the replica."""
        models = [request.model for request in trace]
        self.outcome = Outcome(requests=len(trace), fewest=fewest_loads(models, ROOM))

    async def run(self) -> Outcome:
        """Replay the trace; return what happened."""
        fleet, at = self._fleet, 0
        async with following(fleet.caches):
            await fleet.begin()
            while at < len(self._trace) or any(load.waiting for load in self._loads.values()):
                now_s = fleet.clock.monotonic()
                while at < len(self._trace) and self._trace[at].at_s <= now_s:
                    request = self._trace[at]
                    self._loads[name_of(request.model)].waiting.append(request)
                    at += 1
                self._serve(now_s)
                self._scrape(now_s)
                await fleet.reconcile()
                await self._run_agents(now_s)
                self._note_messages()
                await fleet.clock.advance(self._next_s(now_s, at) - now_s)
        return self.outcome

    def _next_s(self, now_s: float, at: int) -> float:
        """Return the next whole second in which something happens."""
        times = [self._trace[at].at_s] if at < len(self._trace) else []
        times += [at_s for load in self._loads.values() for at_s in load.busy_until_s]
        times += [at_s for at_s in self._loading.values() if at_s > now_s]
        times += self._fleet.due.values()
        return max(now_s + 1, float(ceil(min(times, default=now_s))))

    def _serve(self, now_s: float) -> None:
        """End requests, and begin those whose model serves."""
        for name, load in self._loads.items():
            running = [at_s for at_s in load.busy_until_s if at_s > now_s]
            load.finished += len(load.busy_until_s) - len(running)
            load.busy_until_s = running
            if name not in self._ready:
                continue
            for request in load.waiting:
                wait_s = now_s - request.at_s
                self.outcome.waits.append(wait_s)
                self.outcome.longest_wait_s = max(self.outcome.longest_wait_s, wait_s)
                self.outcome.failed += wait_s > HOLD_S
                load.busy_until_s.append(now_s + request.takes_s)
            load.waiting.clear()

    def _scrape(self, now_s: float) -> None:
        """Report the load of all models, as one gateway."""
        sample = GatewaySample()
        for name, load in self._loads.items():
            sample.in_flight[name] = len(load.busy_until_s)
            sample.waiting[name] = len(load.waiting)
            sample.versions[name] = {"": VersionSample(outcomes={"ok": float(load.finished)})}
            figures = len(load.busy_until_s), len(load.waiting), load.finished
            if figures != load.reported:
                load.reported = figures
                self._fleet.due[name] = now_s
        needed = {name_of(model) for model in range(MODELS)}
        self._fleet.totals.record({"g": sample}, {"g": "http://g:1"}, needed, now_s)

    async def _run_agents(self, now_s: float) -> None:
        """Start and end engines, and check what must hold."""
        used: Counter[str] = Counter()
        for replica in list(self._fleet.lister.replicas()):
            name, rank, uid = replica.spec.deployment, replica.spec.ranks[0], replica.metadata.uid
            used[rank.node] += rank.memory.total_bytes
            if replica.metadata.deletion_timestamp is not None:
                await self._end(replica, now_s)
            elif uid not in self._loading:
                self.outcome.loads += 1
                self._loading[uid] = now_s + LOAD_S
            elif now_s >= self._loading[uid] and name not in self._ready:
                self._ready[name] = replica, now_s
                await self._fleet.write(put_rank(replica), put_endpoint(replica))
                self._fleet.due[name] = now_s
        self.outcome.over_memory += any(size > 41 * GIB for size in used.values())

    async def _end(self, replica: Replica, now_s: float) -> None:
        name = replica.spec.deployment
        serving = self._ready.get(name)
        if serving is not None and serving[0].metadata.uid == replica.metadata.uid:
            del self._ready[name]
            self.outcome.cut += len(self._loads[name].busy_until_s)
            self.outcome.too_early += now_s - serving[1] < residence_s(LOAD_S)
            key = keys.endpoint_key(replica.spec.ranks[0].node, replica.name)
            await self._fleet.write(Delete(key=key))
        elif not self._loads[name].busy_until_s:
            await self._fleet.write(put_rank(replica, "Stopped"))
        self._fleet.due[name] = now_s

    def _note_messages(self) -> None:
        for name, load in self._loads.items():
            status = self._fleet.lister.deployment_status(name) if load.waiting else None
            for condition in status.conditions if status is not None else ():
                if condition.type == "Placed" and condition.reason == "Unschedulable":
                    self.outcome.messages.add(condition.message)


def replay(kind: str, seed: int, hours: float) -> Outcome:
    """Generate a trace, and replay it."""
    trace = TRACES[kind](random.Random(seed), hours * 3600)
    return asyncio.run(Simulation(trace).run())


def main() -> None:
    """Replay all traces and print what happened."""
    rows, ratios, others = [], {}, dict[str, float]()
    for kind in TRACES:
        outcomes = [replay(kind, seed, HOURS) for seed in range(SEEDS)]
        loads, fewest = sum(o.loads for o in outcomes), sum(o.fewest for o in outcomes)
        ratios[f"{kind}_loads_to_fewest"] = round(loads / fewest, 3)
        figures = {
            "requests": sum(o.requests for o in outcomes),
            "loads": loads,
            "fewest": fewest,
            "failed": sum(o.failed for o in outcomes),
            "cut": sum(o.cut for o in outcomes),
            "over_memory": sum(o.over_memory for o in outcomes),
            "too_early": sum(o.too_early for o in outcomes),
            "longest_wait_s": round(max(o.longest_wait_s for o in outcomes), 1),
        }
        rows.append({"trace": kind, **figures})
        others |= {f"{kind}_{name}": value for name, value in figures.items()}
    print(tabulate(rows, headers="keys"))
    finish("swap", ratios, others)


if __name__ == "__main__":
    main()
