"""Our gateway beside other gateways, in under five minutes: `make bench-gateway`.

The same two stand-in engines are behind every row; all are loaded in turns by short bursts, so that a noisy moment hits
them alike, and medians count. Load, engines and gateways share this machine's cores: read ratios, and processor time.
Ours has everything on: keys, scoring, sessions, metrics, the journal, marks for resumption. The last line is JSON.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.gateway import loading, ours, peers
from bench.gateway.aims import aims, shown
from bench.gateway.loading import Load
from bench.gateway.parts import Engine, Programs, compiled, cpu_s, free_port, rss_mb
from bench.gateway.peers import Peer
from bench.result import SMOKE, finish, sized

ROUNDS = sized(4, smoke=1)
SLOW_ROUNDS = sized(2, smoke=1)
BURST_S = sized(1.0, smoke=0.2)
_WARM_S = sized(0.3, smoke=0.05)
# Whoever is slow gets no more than this many at once: a burst lasts as long as its longest answer.
_SLOW_CONNECTIONS = 8


@dataclass(frozen=True)
class Case:
    """One workload: the request, and the number of clients at once."""

    name: str
    connections: int
    is_streamed: bool = False
    pace_us: int = 0


CASES = (
    Case("whole_c1", 1),
    Case("whole_c16", 16),
    Case("whole_c64", 64),
    Case("stream_c64", 64, is_streamed=True),
    # As engines stream: the time to the first event is not that of a queue.
    Case("paced_c16", 16, is_streamed=True, pace_us=5000),
)


@dataclass
class Bursts:
    """The figures of one peer in one case."""

    rates: list[float] = field(default_factory=list)
    p50_us: list[float] = field(default_factory=list)
    p99_us: list[float] = field(default_factory=list)
    first_us: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    count: int = 0
    failed: int = 0

    def add(self, records: loading.Records, spent_s: float) -> None:
        well = records[records["outcome"] == 0]
        self.failed += len(records) - len(well)
        if not len(well):
            return
        self.rates.append(len(well) / loading.elapsed_s(records))
        self.p50_us.append(float(np.percentile(well["whole_s"], 50)) * 1e6)
        self.p99_us.append(float(np.percentile(well["whole_s"], 99)) * 1e6)
        self.first_us.append(float(np.percentile(well["first_s"], 50)) * 1e6)
        self.cpu_s += spent_s
        self.count += len(well)


@dataclass(frozen=True)
class Row:
    """One peer in one case; medians over the bursts."""

    case: str
    peer: Peer
    rate: float
    p50_us: float
    p99_us: float
    first_us: float
    cpu_us: float
    """Of the gateway's processes, per request."""
    failed: int


async def measure(
    programs: Programs,
    engines: Sequence[Engine],
    contenders: Sequence[Peer],
    burst_s: float = BURST_S,
) -> list[Row]:
    """Load all peers in turns."""
    found = []
    for case in CASES:
        for engine in engines:
            engine.set(f"pace/{case.pace_us}")
        bursts = {peer.name: Bursts() for peer in contenders}
        for round_ in range(ROUNDS + 1):
            for peer in contenders:
                if peer.is_slow and round_ > SLOW_ROUNDS:
                    continue
                connections = (
                    min(case.connections, _SLOW_CONNECTIONS) if peer.is_slow else case.connections
                )
                load = Load(
                    port=peer.port,
                    connections=connections,
                    seconds=burst_s if round_ else _WARM_S,
                    is_streamed=case.is_streamed,
                    key=peer.key,
                    is_tls=peer.is_tls,
                )
                before_s = cpu_s(peer.pid)
                records = await loading.run(programs, load)
                if round_:  # the first warms up
                    bursts[peer.name].add(records, cpu_s(peer.pid) - before_s)
        found += [
            row(case, peer, bursts[peer.name]) for peer in contenders if bursts[peer.name].count
        ]
    return found


def row(case: Case, peer: Peer, bursts: Bursts) -> Row:
    return Row(
        case=case.name,
        peer=peer,
        rate=statistics.median(bursts.rates),
        p50_us=statistics.median(bursts.p50_us),
        p99_us=statistics.median(bursts.p99_us),
        first_us=statistics.median(bursts.first_us),
        # The clock of processes may not have ticked in a short burst.
        cpu_us=max(bursts.cpu_s, 0.001) / bursts.count * 1e6,
        failed=bursts.failed,
    )


@dataclass(frozen=True)
class Figures:
    """The figures of one gateway that are compared."""

    peer: Peer
    requests_per_s: float
    requests_per_cpu_s: float
    cpu_s_per_1000_requests: float
    added_p50_us_c1: float
    added_p99_us_c1: float
    added_p50_us_c16: float
    added_p99_us_c16: float
    added_first_us_c16: float
    chunks_per_s: float
    chunks_per_cpu_s: float
    cpu_s_per_10000_chunks: float
    cpu_s_per_10000_chunks_paced: float
    rss_mb: float
    failed: int


def figures(rows: Sequence[Row], contenders: Sequence[Peer]) -> Iterator[Figures]:
    """Yield every gateway's figures; direct is what is taken off."""
    by = {(row.case, row.peer.name): row for row in rows}
    for peer in contenders:
        if peer.name == "direct":
            continue
        if any((case.name, peer.name) not in by for case in CASES):
            continue
        c1, c16, c64, stream, paced = (by[case.name, peer.name] for case in CASES)
        yield Figures(
            peer=peer,
            requests_per_s=c64.rate,
            requests_per_cpu_s=1e6 / c64.cpu_us,
            cpu_s_per_1000_requests=c64.cpu_us / 1e3,
            added_p50_us_c1=c1.p50_us - by["whole_c1", "direct"].p50_us,
            added_p99_us_c1=c1.p99_us - by["whole_c1", "direct"].p99_us,
            added_p50_us_c16=c16.p50_us - by["whole_c16", "direct"].p50_us,
            added_p99_us_c16=c16.p99_us - by["whole_c16", "direct"].p99_us,
            added_first_us_c16=paced.first_us - by["paced_c16", "direct"].first_us,
            chunks_per_s=stream.rate * loading.EVENTS,
            chunks_per_cpu_s=loading.EVENTS * 1e6 / stream.cpu_us,
            cpu_s_per_10000_chunks=stream.cpu_us / loading.EVENTS / 100,
            cpu_s_per_10000_chunks_paced=paced.cpu_us / loading.EVENTS / 100,
            rss_mb=rss_mb(peer.pid),
            failed=sum(by[case.name, peer.name].failed for case in CASES),
        )


async def main() -> None:
    """Measure and print."""
    began_s = time.monotonic()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet-bench-")))
        programs = compiled(folder)
        engines = [Engine(programs, f"bench-{n}", free_port()) for n in range(2)]
        for engine in engines:
            engine.start()
            stack.callback(engine.end)
        gateway = await ours.start(stack, folder, {"bench": engines})
        names = [kind.name for kind in peers.KINDS]
        others, failed = await peers.started(stack, folder, engines, names)
        contenders = [
            Peer("direct", engines[0].port),
            Peer("ours", gateway.port, gateway.pid, key=ours.KEY),
            *others,
        ]
        print(
            f"{os.cpu_count()} cores shared by load, gateways, engines and etcd; figures of others are defaults"
        )
        rows = await measure(programs, engines, contenders)
        found = list(figures(rows, contenders))
    measured = {one.peer.name for one in found}
    for peer in (peer for peer in contenders if peer.name not in ("direct", *measured)):
        failed[peer.name] = "it answered nothing in one of the cases"
    if "ours" in failed:
        sys.exit(f"bench gateway: ours: {failed['ours']}")
    direct = {row.case: row for row in rows if row.peer.name == "direct"}
    print(
        f"direct: {direct['whole_c64'].rate:.0f} requests/s, p50 {direct['whole_c1'].p50_us:.0f} us, "
        f"{direct['stream_c64'].rate * loading.EVENTS:.0f} chunks/s"
    )
    print(shown(found))
    result = aims(found)
    for aim in result:
        print(aim)
    compared = {aim.name: round(aim.value, 2) for aim in result if "over" in aim.name}
    last = {
        **{aim.name: round(aim.value, 2) for aim in result if "over" not in aim.name},
        "aims_met": sum(aim.is_met for aim in result),
        "aims": len(result),
        **{f.peer.name: {k: round(v, 4) for k, v in vars(f).items() if k != "peer"} for f in found},
        "seconds": round(time.monotonic() - began_s, 1),
    }
    mine = next(row for row in rows if row.peer.name == "ours" and row.case == "whole_c1")
    cost = {"p50_c1_over_direct": round(mine.p50_us / direct["whole_c1"].p50_us, 2)}
    if SMOKE:  # other gateways need not be installed
        compared |= cost
    finish("gateway", compared, cost | last, failed=failed)
