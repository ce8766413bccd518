"""From `apply` returning to the engine process being started, with the weights on disk: 20 runs.

Beside it, in the same run: how long one write takes to reach a watcher, for the way from apply to
start has two such hops and a write between them; and how long starting a bare process takes.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

from bench.harness import finish, sized
from machinery.clock import SystemClock
from manifests.apply import apply
from manifests.delete import delete
from manifests.load import load_objects
from schemas.deployment import ModelDeployment
from store import objects
from store.etcd.connect import connect
from store.port import Put, Transport
from tests.support.commands import run_module
from tests.support.fleet import Fleet, running_fleet

RUNS = sized(20, smoke=2)
MANIFEST = (
    "apiVersion: fleet/v1alpha1\nkind: ModelDeployment\nmetadata: {{name: run-{number}}}\n"
    "spec: {{model: {{path: tiny}}, contextLength: 512}}\n"
)


async def one(fleet: Fleet, transport: Transport, path: Path, number: int) -> float:
    """Return the milliseconds from apply's return to the engine's start."""
    path.write_text(MANIFEST.format(number=number))
    loaded = load_objects([str(path)])
    await apply(transport, loaded, SystemClock())
    returned = time.time()
    name = f"run-{number}-0"
    while (started := started_at(fleet.log("node-1"), name)) is None:
        await asyncio.sleep(0.02)
    await delete(transport, "ModelDeployment", f"run-{number}", SystemClock())
    while await objects.get(transport, ModelDeployment, f"run-{number}") is not None:
        await asyncio.sleep(0.05)
    return (started - returned) * 1000


def started_at(log: Path, replica: str) -> float | None:
    """Return when the agent had started the engine, by its own log (milliseconds, one clock)."""
    for line in reversed(log.read_text().splitlines()):
        entry = json.loads(line)
        if entry["message"] == "engine started" and entry["replica"] == replica:
            return datetime.fromisoformat(entry["time"]).timestamp()
    return None


async def hop(transport: Transport, number: int) -> float:
    """Return the milliseconds from a write's answer to a watcher having it."""
    key = "/bench/hop"
    before = (await transport.status()).revision
    watch = transport.watch(key, after_revision=before)
    await anext(watch)
    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.wait_for(anext(watch), 10.0))
        await transport.commit([], [Put(key=key, value=str(number).encode())])
    took = time.perf_counter() - began
    await watch.aclose()
    return took * 1000


def bare_process() -> float:
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    took = time.perf_counter() - began
    process.wait()
    return took * 1000


async def measure(root: Path) -> dict[str, float]:
    models = root / "models"
    await run_module("tests.support.tiny_model", str(models / "tiny"))
    async with running_fleet(root / "fleet", models) as fleet:
        transport = connect(fleet.etcd.address)
        runs = [await one(fleet, transport, root / "m.yaml", n) for n in range(RUNS + 1)][1:]
        hops = [await hop(transport, n) for n in range(RUNS)]
        await transport.close()
    bare = [bare_process() for _ in range(RUNS)]
    return {
        "start_ms_p50": round(statistics.median(runs), 1),
        "start_ms_max": round(max(runs), 1),
        "write_to_watcher_ms_p50": round(statistics.median(hops), 1),
        "bare_process_ms_p50": round(statistics.median(bare), 1),
    }


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as root:
        found = asyncio.run(measure(Path(root)))
    floor = 2 * found["write_to_watcher_ms_p50"] + found["bare_process_ms_p50"]
    ratio = {"start_over_two_hops_and_a_process": round(found["start_ms_p50"] / floor, 1)}
    finish("start", ratio, {"runs": RUNS, "aim_ms": 150, **found})


if __name__ == "__main__":
    main()
