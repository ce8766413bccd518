"""Loads peers in turns by short bursts, so that a noisy moment hits them alike."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.gateway import loading
from bench.gateway.figures import Burst, Results
from bench.gateway.parts import Engine, Programs, cpu_s, own_core
from bench.gateway.peers import Peer
from bench.gateway.workloads import CASES, Case

_WARM_S = 0.15


@dataclass(frozen=True)
class Plan:
    """The size of a run."""

    rounds: int
    slow_rounds: int
    """For peers that are slow."""
    burst_s: float
    cases: Sequence[Case] = CASES


async def measure(
    programs: Programs, engines: Sequence[Engine], contenders: Sequence[Peer], plan: Plan
) -> Results:
    """Return the bursts of all peers in all cases; each round has every case, in each case every peer has its turn."""
    results = Results(contenders)
    for round_ in range(plan.rounds + 1):
        turns = [
            contender
            for contender in contenders
            if not contender.is_slow or round_ <= plan.slow_rounds
        ]
        for case in plan.cases:
            for engine in engines:
                engine.set(f"pace/{case.pace_us}")
            for peer in turns if round_ % 2 else reversed(turns):
                seconds = plan.burst_s if round_ else min(_WARM_S, plan.burst_s)
                found = await burst(programs, case, peer, seconds)
                if round_ and found is not None:  # the first warms up
                    results.add(case, peer, round_, found)
    return results


async def burst(programs: Programs, case: Case, peer: Peer, seconds: float) -> Burst | None:
    """Load a peer once; None if it answered nothing well."""
    before_s, began_s = cpu_s(peer.pid), time.monotonic()
    with own_core(is_gateway=False):
        records = await loading.run(programs, case.load(peer, seconds))
    spent_s, elapsed_s = cpu_s(peer.pid) - before_s, time.monotonic() - began_s
    well = records[records["outcome"] == 0]
    if not len(well):
        return None
    return Burst(
        rate=len(well) / loading.elapsed_s(records),
        p50_us=float(np.percentile(well["whole_s"], 50)) * 1e6,
        p99_us=float(np.percentile(well["whole_s"], 99)) * 1e6,
        first_us=float(statistics.median(well["first_s"])) * 1e6,
        # An instant in which the process did not run: the clock of processes has ticks outside Linux.
        cpu_us=max(spent_s, 1e-6) / len(well) * 1e6,
        busy=spent_s / elapsed_s,
        failed=len(records) - len(well),
    )
