"""A control plane in trouble: `make bench-degradation`, in five minutes on two cores.

A real etcd with fsync, a real fleet-reconciler and hollow agents (the real agent on engines that are only times). The same
work is done five times, 200 replicas that are applied at once: undisturbed; by a reconciler with a fifth of a core; by an
etcd with a tenth of a core; by an etcd whose disk makes 100 writes a second; and while 500 agents lose their leases and
come back, again and again. Twice more it is done with an etcd in a network namespace, over a link that loses nothing, and
over one that loses one of a hundred packets to etcd. For each there is: when replicas were bound, which leases of the other agents were lost, how
long the reconciler's queue was, how much was written, and how soon after the trouble all was as it should be.
The last line is one JSON object, ratios to the undisturbed run first.
"""

import asyncio
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import TypeAlias

import aiohttp

from bench.control_plane import REPLICAS_PREFIX, deployment
from bench.control_plane_join import RECONCILER
from bench.control_plane_parts import Bench, Crowd, TooSlowError, others, wait_for
from bench.result import PeerError as NotPossibleError
from bench.result import finish, recorded, sized
from bench.scale import listening, running
from reconciler.metrics import QUEUE_DEPTH
from store import codec, keys
from store.errors import StoreError
from tests.support.cluster import running_cluster
from tests.support.netns import Networks, available
from tests.support.ports import free_port
from tests.support.slow_cpu import duty_cycle

STEADY, FLAPPING, LEASE_S = sized((100, 500, 20), smoke=(5, 5, 20))
FLAPPING_LEASE_S, FLAPS = sized((4, 3), smoke=(4, 1))
DEPLOYMENTS, PER_DEPLOYMENT = sized((40, 5), smoke=(2, 2))
JOIN_S, PHASE_S, RECOVERY_S = 60.0, sized(40.0, smoke=30.0), sized(40.0, smoke=60.0)
_BLKIO = Path("/sys/fs/cgroup/blkio")
# As a hard disk makes them; with 20 etcd writes next to nothing.
_WRITES_PER_S = 100
_SAMPLE_S = 0.25
WANTED = DEPLOYMENTS * PER_DEPLOYMENT


class Queue:
    """Samples of the reconciler's queue."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/metrics"
        self.depths: list[int] = []

    async def watch(self) -> None:
        """Sample for ever; a reconciler that does not answer is asked again."""
        timeout = aiohttp.ClientTimeout(total=5.0)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            while True:
                with suppress(aiohttp.ClientError, TimeoutError):
                    async with http.get(self._url) as response:
                        self.depths += _depths(await response.text())
                await asyncio.sleep(_SAMPLE_S)

    def is_empty(self) -> bool:
        return bool(self.depths) and self.depths[-1] == 0


def _depths(text: str) -> list[int]:
    lines = (line.split() for line in text.splitlines())
    return [int(float(words[1])) for words in lines if words[:1] == [QUEUE_DEPTH]]


@asynccontextmanager
async def undisturbed() -> AsyncIterator[None]:
    """Do nothing."""
    yield


@asynccontextmanager
async def slow_disk(pid: int, folder: Path) -> AsyncIterator[None]:
    """Let the process make few writes a second to its disk.

    Raises:
        NotPossibleError: this machine has no such control group, or we may not make one.

    """
    device = folder.stat().st_dev
    limit = f"{os.major(device)}:{os.minor(device)} {_WRITES_PER_S}"
    group = _BLKIO / f"fleet-bench-{os.getpid()}"
    try:
        group.mkdir()
        (group / "blkio.throttle.write_iops_device").write_text(limit)
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        raise NotPossibleError(f"no control group for writes of a disk: {error}") from error
    try:
        yield
    finally:
        (_BLKIO / "cgroup.procs").write_text(str(pid))
        group.rmdir()


@asynccontextmanager
async def flapping(bench: Bench) -> AsyncIterator[None]:
    """Stop the flapping agents for longer than their leases last, and let them go on, again and again."""
    names = [name for name in bench.crowd.children if name.startswith("flapping")]

    def send(number: signal.Signals) -> None:
        for name in names:
            bench.crowd.children[name].send(number)

    async def flap() -> None:
        for _ in range(FLAPS):
            send(signal.SIGSTOP)
            await asyncio.sleep(2 * FLAPPING_LEASE_S)
            send(signal.SIGCONT)
            await asyncio.sleep(FLAPPING_LEASE_S)

    task = asyncio.create_task(flap())
    try:
        yield
        await task
    finally:
        task.cancel()
        send(signal.SIGCONT)


async def join(bench: Bench, name: str, count: int, lease_s: int) -> None:
    """Start agents, 250 in a process, and wait until each has a lease.

    Raises:
        TooSlowError: they have none in time.

    """
    there = len(bench.leases.values)
    for first in range(0, count, 250):
        bench.crowd.start(
            f"{name}-{first}",
            *("nodeagent.hollow", "--name", name, "--first", str(first), "--load", "0"),
            *("--count", str(min(250, count - first)), "--lease", str(lease_s)),
            *("--memory", "64Gi", "--chip", "Apple M4 Max"),
        )
    if not await wait_for(lambda: len(bench.leases.values) >= there + count, JOIN_S):
        raise TooSlowError(f"{count} agents did not join in {JOIN_S:g} s")


async def phase(
    bench: Bench, name: str, queue: Queue, disturbed: AbstractAsyncContextManager[None]
) -> dict[str, object]:
    """Apply deployments while something is wrong; return what became of them and of everybody else."""
    prefix = f"{REPLICAS_PREFIX}{name}"

    def bound() -> int:
        return sum(key.startswith(prefix) for key in bench.replicas.first)

    bench.leases.gone.clear()
    queue.depths.clear()
    before, written = bench.crowd.cost(), bench.replicas.writes
    async with disturbed:
        applied = time.perf_counter()
        puts = [
            codec.put_spec(deployment(f"{name}{number:03}", PER_DEPLOYMENT))
            for number in range(DEPLOYMENTS)
        ]
        for at in range(0, len(puts), 20):
            await bench.transport.commit([], puts[at : at + 20])
        await wait_for(lambda: bound() >= WANTED, PHASE_S)
    calm = time.perf_counter()
    recovered = await wait_for(lambda: queue.is_empty() and serving(bench, name), RECOVERY_S)
    after = bench.crowd.cost()
    delays = [at - applied for key, at in bench.replicas.first.items() if key.startswith(prefix)]
    cuts = statistics.quantiles(delays, n=100, method="inclusive") if len(delays) > 1 else []
    lost = sum(key.startswith(f"{keys.NODE_LEASE_PREFIX}steady-") for key in bench.leases.gone)
    return {
        "bound": len(delays),
        "created_to_bound_p50_s": round(cuts[49], 2) if cuts else None,
        "created_to_bound_p99_s": round(cuts[98], 2) if cuts else None,
        "recovered_s": round(time.perf_counter() - calm, 1) if recovered else None,
        "steady_leases_lost": lost,
        "queue_most": max(queue.depths, default=None),
        "queue_last": queue.depths[-1] if queue.depths else None,
        "replica_writes_each": round((bench.replicas.writes - written) / WANTED, 2),
        "cpu_of_others": others(before, after),
    }


def serving(bench: Bench, name: str) -> bool:
    """Return whether each replica of a phase has an endpoint."""
    there = {key.rpartition("/")[2] for key in bench.endpoints.values}
    return sum(one.startswith(name) for one in there) >= WANTED


Phases: TypeAlias = dict[str, Callable[[], AbstractAsyncContextManager[None]]]


@asynccontextmanager
async def fleet(bench: Bench) -> AsyncIterator[Queue]:
    """Run a reconciler and the steady agents, and follow the reconciler's queue."""
    port = free_port()
    async with asyncio.TaskGroup() as group:
        queue = Queue(port)
        tasks = [
            group.create_task(bench.endpoints.listen(bench.transport, keys.ENDPOINT_PREFIX)),
            group.create_task(queue.watch()),
        ]
        bench.crowd.start("reconciler", *RECONCILER, "--api-port", str(port))
        await join(bench, "steady", STEADY, LEASE_S)
        await bench.crowd.calm("reconciler")
        yield queue
        for task in tasks:
            task.cancel()


@asynccontextmanager
async def over_a_link(folder: Path) -> AsyncIterator[tuple[Bench, Networks]]:
    """Run an etcd in a network namespace of its own.

    Raises:
        NotPossibleError: this machine has no such namespaces, or no nftables.

    """
    if not available() or shutil.which("nft") is None:
        raise NotPossibleError("a lossy link needs network namespaces and nftables")
    folder.mkdir()
    with Networks(1).made() as networks:
        async with running_cluster(folder, places=[networks.place(0)]) as cluster:
            (member,) = cluster.members
            pid = member.process.pid
            assert pid is not None
            crowd = Crowd(etcd_flag=member.url, folder=folder, pids={"etcd": pid})
            async with listening(cluster.address(), crowd) as bench:
                yield bench, networks


@asynccontextmanager
async def lossy(networks: Networks, figures: dict[str, object]) -> AsyncIterator[None]:
    """Let the link to etcd lose one of a hundred packets, and count them."""
    with networks.packet_loss(1) as dropped:
        yield
        figures["loss_packets_dropped"] = dropped()


async def run_phases(
    bench: Bench, queue: Queue, phases: Phases, figures: dict[str, object], failed: dict[str, str]
) -> None:
    for name, disturbed in phases.items():
        with recorded(failed, name):
            if name == "flaps":
                await join(bench, "flapping", FLAPPING, FLAPPING_LEASE_S)
            found = await phase(bench, name, queue, disturbed())
            figures |= {f"{name}_{figure}": value for figure, value in found.items()}
            print(f"\n{name}", *(f"  {one:28} {value}" for one, value in found.items()), sep="\n")


async def measure(folder: Path, figures: dict[str, object], failed: dict[str, str]) -> None:
    """Run the phases; what is found is in the figures at once."""
    async with running(folder) as bench, fleet(bench) as queue:
        pids, reconciler = bench.crowd.pids, bench.crowd.pids["reconciler"]
        phases: Phases = {
            "calm": undisturbed,
            "starved": lambda: duty_cycle(reconciler, share=0.2),
            "etcd": lambda: duty_cycle(pids["etcd"]),
            "disk": lambda: slow_disk(pids["etcd"], folder),
            "flaps": lambda: flapping(bench),
        }
        await run_phases(bench, queue, phases, figures, failed)
    with recorded(failed, "loss"):
        async with (
            over_a_link(folder / "link") as (far, networks),
            fleet(far) as queue,
        ):
            phases = {"link": undisturbed, "loss": lambda: lossy(networks, figures)}
            await run_phases(far, queue, phases, figures, failed)


def ratios(figures: dict[str, object]) -> dict[str, float | None]:
    """Return how many times longer the slowest hundredth waited than undisturbed."""
    found: dict[str, float | None] = {}
    for name in ("starved", "etcd", "disk", "flaps", "loss"):
        ours = figures.get(f"{name}_created_to_bound_p99_s")
        before = "link" if name == "loss" else "calm"
        calm = figures.get(f"{before}_created_to_bound_p99_s")
        found[f"{name}_p99_to_calm"] = (
            round(ours / calm, 2) if isinstance(ours, float) and isinstance(calm, float) else None
        )
    return found


def main() -> None:
    """Measure and print; the exit code says whether all of it could be measured."""
    began, figures, failed = time.perf_counter(), dict[str, object](), dict[str, str]()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
        try:
            asyncio.run(measure(Path(root), figures, failed))
        except* (TooSlowError, StoreError) as errors:
            figures["error"] = str(errors.exceptions[0])
    figures["seconds"] = round(time.perf_counter() - began)
    finish("degradation", ratios(figures), figures, failed=failed)
    sys.exit("error" in figures)


if __name__ == "__main__":
    main()
