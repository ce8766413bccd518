"""Our gateway beside other gateways, in under five minutes: `make bench-gateway`; FULL=1: longer, with 10,000 idle streams.

The same two stand-in engines are behind every peer. Processor time is user and system of the peer's process tree, each
request's share. Whole answers are asked for in four kinds of traffic: one head, heads that never repeat, chats of two
turns, both. On Linux each peer has one core; load, engines and etcd have the others. Ours has everything on: a key,
routing by score, sessions and prefixes, metrics, the journal, marks for resumption. The last line is JSON: each ratio
beside its aim, with the least and the greatest of a round.
"""

import asyncio
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tabulate import tabulate

from bench.gateway.load import EVENTS, Engine, Load, compiled, start_engines
from bench.gateway.peers import (
    DIRECT,
    NGINX,
    OURS,
    PREFIX_ROUTERS,
    ROUTERS,
    SLOW,
    Peer,
    compiled_python,
    open_files,
    proof,
    start,
    start_ours,
)
from bench.harness import (
    SMOKE,
    PeerError,
    Spread,
    cpu_s,
    finish,
    recorded,
    rss_mb,
    sized,
    turns,
)

IS_FULL = bool(os.environ.get("FULL")) and not SMOKE
ROUNDS, SLOW_ROUNDS, BURST_S = (20, 4, 1.0) if IS_FULL else sized((5, 1, 0.5), smoke=(1, 1, 0.1))
IDLE = 10_000 if IS_FULL else sized(2000, smoke=50)
_IDLE_PATIENCE_S, _OPEN_S, _SETTLE_S = 60, 30.0, 0.5


@dataclass(frozen=True)
class Case:
    """One workload: the requests, and the number of clients at once."""

    name: str
    connections: int = 64
    is_streamed: bool = False
    pace_us: int = 0
    """Between the events of a stream; 0: as fast as they are taken."""
    turns: int = 1
    has_fresh_heads: bool = False
    least_over_router: float = 0.0
    """Aim: requests (or chunks) a CPU second over those of the best router of any kind."""
    least_over_prefix_router: float = 0.0
    """Aim: the same over the best router that knows prefixes, as ours does."""
    most_over_nginx: float = 0.0
    """Aim: CPU time over that of nginx."""

    def load(self, peer: Peer, seconds: float, **more: float) -> Load:
        """Return the load of this case on one peer."""
        return Load(
            port=peer.port,
            connections=int(more.get("connections", self.connections)),
            seconds=seconds,
            is_streamed=self.is_streamed,
            key=peer.key,
            turns=self.turns,
            has_fresh_heads=self.has_fresh_heads,
            silence_s=more.get("silence_s", 0.0),
        )


# One head that repeats flatters a gateway that remembers heads; chats of one turn, one that remembers no chats.
KINDS = tuple(
    Case(
        name,
        turns=turns_,
        has_fresh_heads=is_fresh,
        least_over_router=0.9,
        least_over_prefix_router=1.8,
    )
    for name, turns_, is_fresh in (
        ("one_head", 1, False),
        ("fresh_heads", 1, True),
        ("two_turns", 2, False),
        ("both", 2, True),
    )
)
ALONE = Case("alone", connections=1)
STREAM = Case("stream", is_streamed=True, least_over_router=1.6, least_over_prefix_router=4)
PACED = Case("paced", is_streamed=True, pace_us=5000, least_over_router=1.3, most_over_nginx=1.05)
"""As engines stream: a token each 5 ms."""
CASES = (*KINDS, ALONE, STREAM, PACED)
FIGURES = ("cpu_us", "busy", "per_s", "p50_us", "p99_us", "first_us")
"""Of a burst: CPU of each request, share of a core, requests a second, latencies, median time to the first byte."""


@dataclass
class Results:
    """The figures of all bursts, by case, peer and round."""

    bursts: dict[tuple[str, str], dict[int, dict[str, float]]] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)

    def rounds(self, case: Case, peer: str) -> Mapping[int, Mapping[str, float]]:
        return self.bursts.get((case.name, peer), {})

    def is_measured(self, peer: str) -> bool:
        """Return whether the peer answered in each case."""
        return all(self.rounds(case, peer) for case in CASES)

    def spread(self, case: Case, peer: str, figure: str) -> Spread:
        return Spread.of(burst[figure] for burst in self.rounds(case, peer).values())

    def compare(
        self,
        case: Case,
        peers: tuple[str, str],
        figure: str,
        by: Callable[[float, float], float] = lambda first, second: first / second,
    ) -> Spread:
        """Compare a figure of two peers, round by round: a moment in which the machine was busy had its effect on both."""
        first, second = (self.rounds(case, peer) for peer in peers)
        return Spread.of(
            by(first[n][figure], second[n][figure]) for n in first.keys() & second.keys()
        )

    def best_router(self, case: Case, figure: str, among: Sequence[str] = ROUTERS) -> str | None:
        """Return the router of language models with the least median; None if there is none."""
        routers = [name for name in among if self.rounds(case, name)]
        return min(routers, key=lambda name: self.spread(case, name, figure).median, default=None)


async def measure(programs: Path, engines: Sequence[Engine], peers: Sequence[Peer]) -> Results:
    """Load all peers in turns by short bursts, case by case in each round."""
    results = Results()
    for round_ in range(ROUNDS + 1):  # the first warms up
        for case in CASES:
            for engine in engines:
                engine.set(f"pace/{case.pace_us}")
            for _, peer in turns(1, peers if round_ % 2 else peers[::-1]):
                if peer.name == SLOW and round_ > SLOW_ROUNDS:
                    continue
                before_s, began_s = cpu_s(peer.pid), time.monotonic()
                seconds = BURST_S if round_ else min(0.15, BURST_S)
                records = await case.load(peer, seconds).run(programs)
                spent_s, passed_s = cpu_s(peer.pid) - before_s, time.monotonic() - began_s
                well = records[records["outcome"] == 0]
                if not round_ or not len(well):
                    continue
                ends = records["began_s"] + records["whole_s"]
                results.failed[peer.name] = (
                    results.failed.get(peer.name, 0) + len(records) - len(well)
                )
                values = (
                    # An instant in which the process did not run: the clock of processes has ticks outside Linux.
                    max(spent_s, 1e-6) / len(well) * 1e6,
                    spent_s / passed_s,
                    len(well) / float(ends.max() - records["began_s"].min()),
                    *(float(np.percentile(well["whole_s"], q)) * 1e6 for q in (50, 99)),
                    float(np.median(well["first_s"])) * 1e6,
                )
                burst = dict(zip(FIGURES, values, strict=True))
                results.bursts.setdefault((case.name, peer.name), {})[round_] = burst
    return results


async def idle_kib(programs: Path, folder: Path, name: str, count: int) -> float:
    """Return the KiB that each of so many streams takes that wait for their next token, on a gateway just started.

    Raises:
        PeerError: it cannot be started, or less than half of the streams open.

    """
    async with AsyncExitStack() as stack:
        own = folder / f"idle-{name.replace(' ', '-')}"
        own.mkdir()
        # The role, and then nothing for as long as this lasts.
        pace = f"pace_us={_IDLE_PATIENCE_S * 1_000_000}"
        engines = start_engines(stack, programs, 2, pace, name="idle")
        if name == OURS:
            peer = await start_ours(stack, own, {"bench": engines}, concurrency=1 << 16)
        else:
            peer = await start(stack, own, name, engines, _IDLE_PATIENCE_S)
        await KINDS[0].load(peer, 0.3).run(programs)
        before_mb = rss_mb(peer.pid)
        load = STREAM.load(peer, 1e9, connections=count, silence_s=_IDLE_PATIENCE_S)
        async with load.running(programs):
            until_s, opened = time.monotonic() + _OPEN_S, 0
            while opened < count and time.monotonic() < until_s:
                await asyncio.sleep(0.1)
                opened = int(sum(engine.stat("in_flight") for engine in engines))
            if opened < count / 2:
                raise PeerError(f"{opened} of {count} streams are open after {_OPEN_S:g} s")
            await asyncio.sleep(_SETTLE_S)
            return (rss_mb(peer.pid) - before_mb) * 1e6 / opened / 1024


def aims(
    results: Results, idle: Mapping[str, float]
) -> Iterator[tuple[str, Spread, str, float, str]]:
    """Yield name, figure, comparison, bound and peer of the aims that can be judged with the peers that are there."""
    for case in CASES:
        what = "chunks" if case.is_streamed else "requests"
        for kind, routers, least in (
            ("router", ROUTERS, case.least_over_router),
            ("prefix_router", PREFIX_ROUTERS, case.least_over_prefix_router),
        ):
            if least and (best := results.best_router(case, "cpu_us", routers)):
                ratio = results.compare(case, (best, OURS), "cpu_us")
                yield f"{what}_per_cpu_s_over_best_{kind}_{case.name}", ratio, ">=", least, best
        if case.most_over_nginx and results.rounds(case, NGINX):
            ratio = results.compare(case, (OURS, NGINX), "cpu_us")
            yield f"cpu_over_nginx_{case.name}", ratio, "<=", case.most_over_nginx, NGINX
        if case in KINDS and (best := results.best_router(case, "p99_us")):
            ratio = results.compare(case, (OURS, best), "p99_us")
            yield f"p99_over_best_router_{case.name}", ratio, "<=", 1.2, best
    if best := results.best_router(ALONE, "p50_us"):
        ratio = results.compare(ALONE, (OURS, best), "p50_us")
        yield "p50_over_best_router_alone", ratio, "<=", 1, best
    if results.rounds(ALONE, NGINX):
        added = results.compare(ALONE, (OURS, NGINX), "p50_us", lambda ours, nginx: ours - nginx)
        yield "added_p50_us_alone", added, "<=", 70, NGINX
    if OURS in idle:
        yield "kib_per_idle_stream", Spread.of([idle[OURS]]), "<=", 12, ""


def table(results: Results, peers: Sequence[str], idle: Mapping[str, float]) -> str:
    """Return a table of processor time with a row for each peer."""
    rows = []
    for name in peers:
        spreads = [results.spread(case, name, "cpu_us") for case in CASES]
        events = [EVENTS if case.is_streamed else 1 for case in CASES]
        each = [
            round(spread.median / count, 1) for spread, count in zip(spreads, events, strict=True)
        ]
        rows.append([name, *each, idle.get(name), results.failed.get(name, 0)])
    kinds = [case.name.replace("_", " ") for case in KINDS]
    heads = [*kinds, "alone", "chunk", "chunk, paced", "KiB/idle stream", "failed"]
    return tabulate(rows, headers=["CPU us each", *heads], floatfmt=".1f")


async def main() -> None:
    """Measure and print."""
    failed: dict[str, str] = {}
    limit = open_files()
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    idle_count = min(IDLE, (limit - 500) // 2)  # two files for each stream, and some more
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as path:
        folder = Path(path)
        programs = compiled(folder)
        async with AsyncExitStack() as stack:
            engines = start_engines(stack, programs, 2)
            ours = await start_ours(stack, folder / OURS, {"bench": engines})
            peers = [ours, Peer(DIRECT, engines[0].port)]
            for name in (NGINX, *ROUTERS):
                with recorded(failed, name):
                    peers.append(await start(stack, folder, name, engines))
            results = await measure(programs, engines, peers)
            memory = {peer.name: rss_mb(peer.pid) for peer in peers}
            signs = proof(ours.port, engines)
        idle: dict[str, float] = {}
        for name in memory:
            if name not in (DIRECT, SLOW):
                with recorded(failed, f"{name}, idle streams"):
                    idle[name] = await idle_kib(programs, folder, name, idle_count)
    for name in memory:
        if not results.is_measured(name):
            failed[name] = "it answered nothing in one of the cases"
    if OURS in failed or DIRECT in failed:
        sys.exit(f"bench gateway: {failed}")
    print(table(results, [n for n in memory if n not in (*failed, DIRECT)], idle))
    compared: dict[str, object] = {}
    for name, spread, sign, bound, beside in aims(results, idle):
        is_met = spread.median >= bound if sign == ">=" else spread.median <= bound
        compared[name] = {
            **spread.as_json(),
            "aim": f"{sign} {bound}",
            "is_met": is_met,
            "beside": beside,
        }
        print(f"{'met' if is_met else 'MISSED':7}{name:52}{spread.median:8.2f} {sign} {bound}")
    # Other gateways need not be installed in a smoke test.
    direct = results.compare(ALONE, (OURS, DIRECT), "p50_us")
    compared["p50_over_direct_alone"] = direct.as_json()
    figures = {
        "idle_streams": idle_count,
        "idle_stream_kib": {name: round(kib, 1) for name, kib in idle.items()},
        "everything_on": signs,
        "python": compiled_python(),
        "peers": {
            name: {
                "rss_mb": memory[name],
                "failed": results.failed.get(name, 0),
                **{
                    case.name: {
                        figure: results.spread(case, name, figure).as_json()["median"]
                        for figure in FIGURES
                    }
                    for case in CASES
                    if results.rounds(case, name)
                },
            }
            for name in memory
        },
    }
    finish("gateway", compared, figures, failed=failed)


if __name__ == "__main__":
    asyncio.run(main())
