"""`python -m bench.store`: our store's clients beside the other Python clients of etcd, in 4 minutes.

One real etcd with fsync on a loopback port; every client in a process of its own; rounds take turns,
so that a noisy moment hits all alike. CPU per operation is the figure to trust. The last line is one
JSON object, ratios first.
"""

import asyncio
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from bench.result import finish
from bench.store import cases, peers, report
from bench.store.cases import Case
from bench.store.child import Worker, WorkerError
from bench.store.server import fill, running_etcd
from bench.store.ways import OURS, PEERS
from store.etcd.member.binary import locate


async def measure(workers: Sequence[Worker], case: Case, results: report.Results) -> None:
    """Run the case with every client, in turns."""
    rounds: dict[str, list[dict[str, float]]] = {}
    for round_ in range(max(case.rounds, case.rounds_of_peers)):
        for worker in workers:
            way = worker.way
            wanted = case.rounds if way.is_ours else case.rounds_of_peers
            if round_ >= min(wanted, 1 if way.is_slow else wanted):
                continue
            if why := way.reason_to_skip(case.name):
                results.notes[way.name, case.name] = why
                continue
            try:
                figures = await worker.do(case.work, case.arguments, case.limit_s)
            except WorkerError as error:
                results.notes[way.name, case.name] = str(error)
                continue
            rounds.setdefault(way.name, []).append(figures)
    for name, found in rounds.items():
        results.figures[case.name, name] = {
            figure: statistics.median(one[figure] for one in found) for figure in found[0]
        }


async def run(folder: Path, results: report.Results) -> None:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(running_etcd(locate(None), folder))
        workers = []
        for number, way in enumerate(results.ways):
            worker = await Worker.start(way, server, folder / f"{number}.log")
            stack.push_async_callback(worker.stop)
            if worker.lost:
                results.notes[way.name, "all"] = worker.lost
            workers.append(worker)
        is_filled = False
        for case in cases.cases():
            if case.work == "lists" and not is_filled:
                is_filled = True
                for count in cases.COUNTS:
                    documents = [cases.document(number) for number in range(count)]
                    await fill(server.url, cases.prefix(count), documents)
            began_s = time.monotonic()
            await measure(workers, case, results)
            print(f"{case.name}: {time.monotonic() - began_s:.0f} s", flush=True)


def main() -> None:
    """Measure and print."""
    began_s = time.monotonic()
    # Otherwise a SIGTERM would leave etcd behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    missing = peers.prepare(PEERS)
    for name, why in missing.items():
        print(f"{name} cannot be installed and is not compared: {why}")
    installed_s = time.monotonic() - began_s
    ways = [*OURS, *(way for way in PEERS if way.name not in missing)]
    results = report.Results(ways=ways)
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as folder:
        asyncio.run(run(Path(folder), results))
    print(
        f"\netcd {locate(None).text}, fsync on; {os.cpu_count()} cores shared by it and its clients."
    )
    print(f"Medians of the rounds.\n\n{report.tables(results)}\n")
    for line in report.verdicts(results):
        print(line)
    figures = {
        **report.figures(results),
        "install_seconds": round(installed_s, 1),
        "seconds": round(time.monotonic() - began_s, 1),
    }
    failed = missing | report.failures(results)
    finish("store", report.ratios(results), figures, failed=failed)
    if ours := [way.name for way in OURS if way.name in failed]:
        sys.exit(f"bench store: {', '.join(ours)} failed")


if __name__ == "__main__":
    main()
