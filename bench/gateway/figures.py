"""Figures of `bench.gateway`: what bursts showed, medians over the rounds, and peers compared round by round. Pure."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tabulate import tabulate

from bench.gateway.loading import EVENTS
from bench.gateway.peers import Peer
from bench.gateway.workloads import ALONE, CASES, KINDS, PACED, STREAM, Case

DIRECT = "direct"
"""The load on an engine without a gateway."""


@dataclass(frozen=True, kw_only=True)
class Burst:
    """One burst of load on one peer."""

    rate: float
    p50_us: float
    p99_us: float
    first_us: float
    """Median time to the first byte."""
    cpu_us: float
    """Of the peer's processes, user and system, per request."""
    busy: float
    """The peer's processor time over the time that passed: 1 is one core."""
    failed: int


Value = Callable[[Burst], float]


def of_cpu(burst: Burst) -> float:
    return burst.cpu_us


def of_p50(burst: Burst) -> float:
    return burst.p50_us


def of_p99(burst: Burst) -> float:
    return burst.p99_us


@dataclass(frozen=True)
class Spread:
    """A figure of several rounds: the median, the least and the greatest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        found = sorted(values)
        return cls(statistics.median(found), found[0], found[-1])


@dataclass
class Results:
    """All bursts of a run, by case, peer and round."""

    peers: Sequence[Peer]
    bursts: dict[tuple[str, str], dict[int, Burst]] = field(default_factory=dict)

    def add(self, case: Case, peer: Peer, round_: int, burst: Burst) -> None:
        self.bursts.setdefault((case.name, peer.name), {})[round_] = burst

    def rounds(self, case: Case, peer: str) -> Mapping[int, Burst]:
        return self.bursts.get((case.name, peer), {})

    def spread(self, case: Case, peer: str, value: Value) -> Spread:
        return Spread.of(value(burst) for burst in self.rounds(case, peer).values())

    def is_measured(self, peer: str, cases: Sequence[Case] = CASES) -> bool:
        """Return whether the peer answered in each of these cases."""
        return all(self.rounds(case, peer) for case in cases)

    def failed(self, peer: str) -> int:
        """Return the number of requests that failed."""
        return sum(
            burst.failed
            for (_, name), rounds in self.bursts.items()
            if name == peer
            for burst in rounds.values()
        )

    def ratio(self, case: Case, over: str, under: str, value: Value) -> Spread:
        """Return one peer's figure over another's, of rounds in which both were measured.

        A moment in which the machine was busy had its effect on both.
        """
        first, second = self.rounds(case, over), self.rounds(case, under)
        return Spread.of(value(first[n]) / value(second[n]) for n in first.keys() & second.keys())

    def difference(self, case: Case, one: str, other: str, value: Value) -> Spread:
        """Return one peer's figure less another's, of rounds in which both were measured."""
        first, second = self.rounds(case, one), self.rounds(case, other)
        return Spread.of(value(first[n]) - value(second[n]) for n in first.keys() & second.keys())

    def best_router(self, case: Case, value: Value) -> str | None:
        """Return the router of language models with the least median; None if there is none."""
        routers = [p.name for p in self.peers if p.is_llm_router and self.rounds(case, p.name)]
        return min(routers, key=lambda name: self.spread(case, name, value).median, default=None)


def format_spread(spread: Spread) -> str:
    """Return the median, and least and greatest."""
    digits = 1 if spread.median < 100 else 0
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f}-{spread.high:.{digits}f})"


def tables(results: Results, idle_kib: Mapping[str, float]) -> str:
    """Return two tables, a row for each peer: processor time; then time that passes, and memory."""
    cost, speed = [], []
    for name in (peer.name for peer in results.peers if results.is_measured(peer.name)):
        chunks = [
            results.spread(case, name, lambda burst: burst.cpu_us / EVENTS)
            for case in (STREAM, PACED)
        ]
        requests = [results.spread(case, name, of_cpu) for case in (*KINDS, ALONE)]
        if name != DIRECT:
            cost.append([name, *(format_spread(spread) for spread in (*requests, *chunks))])
        added = results.difference(ALONE, name, DIRECT, of_p50).median
        p99_ms = [round(results.spread(case, name, of_p99).median / 1e3, 1) for case in KINDS]
        rates = [
            round(results.spread(case, name, lambda burst: burst.rate).median)
            for case in (KINDS[0], STREAM)
        ]
        kib = idle_kib.get(name)
        first_ms = results.spread(PACED, name, lambda burst: burst.first_us).median / 1e3
        speed.append(
            (
                name,
                rates[0],
                rates[1] * EVENTS,
                round(added),
                *p99_ms,
                round(first_ms, 1),
                None if kib is None else round(kib, 1),
                results.failed(name),
            )
        )
    kinds = [case.name.replace("_", " ") for case in KINDS]
    cost_heads = ["CPU us each", *kinds, "alone", "chunk", "chunk, paced"]
    speed_heads = ["c=64", "req/s", "chunks/s", "+p50 us, c=1", *(f"p99 ms, {k}" for k in kinds)]
    speed_heads += ["first ms", "KiB/idle stream", "failed"]
    return f"{tabulate(cost, headers=cost_heads)}\n\n{tabulate(speed, headers=speed_heads)}"


def summary(results: Results, peer: str) -> dict[str, dict[str, float]]:
    """Return a peer's figures for the last line: medians of each case, and the spread of its processor time."""
    found = {}
    for case in CASES:
        if not results.rounds(case, peer):
            continue
        cpu = results.spread(case, peer, of_cpu)
        cost = {
            "cpu_us": round(cpu.median, 1),
            "cpu_us_low": round(cpu.low, 1),
            "cpu_us_high": round(cpu.high, 1),
            "busy": round(results.spread(case, peer, lambda burst: burst.busy).median, 2),
        }
        found[case.name] = {
            **(cost if peer != DIRECT else {}),
            "per_s": round(results.spread(case, peer, lambda burst: burst.rate).median),
            "p50_us": round(results.spread(case, peer, of_p50).median),
            "p99_us": round(results.spread(case, peer, of_p99).median),
            "first_us": round(results.spread(case, peer, lambda burst: burst.first_us).median),
        }
    return found
