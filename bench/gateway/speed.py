"""Our gateway beside other gateways, in under five minutes: `make bench-gateway`; FULL=1: longer, with 10,000 idle streams.

The same two stand-in engines are behind every peer. Processor time is user and system of the peer's process tree, each
request's share; `floor` is bare protocols on uvloop. Whole answers are asked for in four kinds of traffic: one head, heads
that never repeat, chats of two turns, both. On Linux each peer has one core; load, engines and etcd have the others.
Ours has everything on: a key, routing by score, sessions and prefixes, metrics, the journal, marks for resumption. The
last line is JSON: each ratio beside its aim, with the least and the greatest of a round.
"""

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from bench.gateway import idle_streams, ours, peers
from bench.gateway.aims import OURS, aims, over_floor
from bench.gateway.figures import DIRECT, of_p50, summary, tables
from bench.gateway.parts import Engine, Programs, compiled, free_port, own_core, rss_mb
from bench.gateway.peers import Peer
from bench.gateway.peers_install import install
from bench.gateway.rounds import Plan, measure
from bench.gateway.workloads import ALONE
from bench.result import SMOKE, finish, sized

BRIEF = sized(Plan(5, 1, 0.5), smoke=Plan(1, 1, 0.1))
FULL = Plan(20, 4, 1.0)
_IDLE_BRIEF, _IDLE_FULL = sized(2000, smoke=50), 10_000


async def _started(
    stack: AsyncExitStack, programs: Programs, folder: Path, names: Sequence[str]
) -> tuple[list[Peer], list[Engine], dict[str, str]]:
    """Start engines, ours and the others; return the contenders, ours first, and why others are missing."""
    with own_core(is_gateway=False):
        engines = [Engine(programs, f"bench-{n}", free_port()) for n in range(2)]
        for engine in engines:
            stack.callback(engine.end)
            engine.start()
    gateway = await ours.start(stack, folder / OURS, {"bench": engines})
    others, failed = await peers.started(stack, folder, engines, names)
    mine = Peer(OURS, gateway.port, gateway.pid, key=ours.KEY)
    return [mine, Peer(DIRECT, engines[0].port), *others], engines, failed


async def main() -> None:
    """Measure and print."""
    began_s = time.monotonic()
    is_full = bool(os.environ.get("FULL")) and not SMOKE
    names = [kind.name for kind in peers.KINDS]
    # A smoke test measures those that are there.
    failed = {} if SMOKE else install(names)
    installed_s = time.monotonic() - began_s
    idle_count = min(_IDLE_FULL if is_full else _IDLE_BRIEF, idle_streams.most())
    cores = os.cpu_count()
    others_load = round(os.getloadavg()[0], 2)
    print(
        f"{cores} cores shared by load, gateways, engines and etcd; load average before: {others_load}",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as path:
        folder = Path(path)
        programs = compiled(folder)
        async with AsyncExitStack() as stack:
            contenders, engines, more = await _started(
                stack, programs, folder, [name for name in names if name not in failed]
            )
            failed |= more
            results = await measure(programs, engines, contenders, FULL if is_full else BRIEF)
            rss = {peer.name: rss_mb(peer.pid) for peer in contenders}
            proof = ours.proof(contenders[0].port, engines)
        fast = [
            contender.name for contender in contenders if contender.pid and not contender.is_slow
        ]
        idle_kib = await idle_streams.measure(programs, folder, fast, idle_count, failed)
    for peer in contenders:
        if not results.is_measured(peer.name):
            failed[peer.name] = "it answered nothing in one of the cases"
    if OURS in failed or DIRECT in failed:
        sys.exit(f"bench gateway: {failed}")
    print(tables(results, idle_kib))
    found = list(aims(results, idle_kib))
    for aim in found:
        print(aim)
    compared: dict[str, object] = {aim.name: aim.figures for aim in found}
    if SMOKE:  # other gateways need not be installed
        ratio = results.ratio(ALONE, OURS, DIRECT, of_p50)
        compared["p50_over_direct_alone"] = round(ratio.median, 2)
    last = {
        "aims_met": sum(aim.is_met for aim in found),
        "aims": len(found),
        "cpu_over_floor": over_floor(results),
        "idle_streams": idle_count,
        "idle_stream_kib": {name: round(kib, 1) for name, kib in idle_kib.items()},
        "everything_on": proof,
        "load_average_before": others_load,
        "peers": {
            name: {**summary(results, name), "rss_mb": mb, "failed": results.failed(name)}
            for name, mb in rss.items()
        },
        "seconds": round(time.monotonic() - began_s - installed_s, 1),
    }
    finish("gateway", compared, last, failed=failed)
