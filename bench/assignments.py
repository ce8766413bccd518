"""Cost of one more Replica for a fleet's agents: each watches all Replicas, or its own copies below its node.

One real etcd with fsync; agents' caches with a connection each, in a process of their own; a leader that writes the
Replicas, and keeps copies in every second round. CPU for one Replica is the figure to trust. `make bench-assignments`
takes a minute; its last line is one JSON object, ratios first.
"""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import psutil

from bench.result import arguments, finish, sized
from machinery.clock import SystemClock
from nodeagent.engines.group_launch import rank_of_node
from nodeagent.replicas.node_replicas import NodeReplicas
from reconciler.assignments import assignment_keeper
from reconciler.listers.caches import decode_spec
from reconciler.model_uses import model_use_keeper
from schemas.deployment import ModelSource
from schemas.meta import ObjectMeta
from schemas.replica import MemoryProof, RankAssignment, Replica, ReplicaSpec
from store import codec, keys
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.etcd.member.binary import locate
from store.etcd.member.embedded import EmbeddedEtcd
from store.informer import Informer
from store.leases import Election
from store.port import Delete, Transport

AGENTS = sized(250, smoke=4)
REPLICAS = sized(500, smoke=8)
ROUNDS = sized(3, smoke=1)
# As many Replicas in a transaction as the reconciler writes.
_BATCH = 30
_LIMIT_S = 120.0
_CLOCK = SystemClock()


def replica(number: int) -> Replica:
    """Return a Replica as the reconciler writes it, on one of the nodes."""
    proof = MemoryProof(
        weights_bytes=2**32, kv_cache_bytes=2**30, activation_bytes=2**28, overhead_bytes=2**28
    )
    return Replica(
        metadata=ObjectMeta(name=f"model-{number}", uid=f"uid-{number}", labels={"team": "a"}),
        spec=ReplicaSpec(
            deployment="model",
            template="0123456789",
            model=ModelSource(path="mlx-community/Qwen2.5-7B-Instruct-4bit"),
            served_names=("model",),
            context_length=8192,
            concurrency=4,
            ranks=(RankAssignment(node=f"node-{number % AGENTS}", memory=proof),),
        ),
    )


async def agents(address: EtcdAddress) -> None:
    """Run the caches of all nodes; answer each line on stdin, a number of Replicas, once they all are where they belong."""
    async with AsyncExitStack() as stack:
        caches: list[tuple[str, NodeReplicas]] = []
        for number in range(AGENTS):
            transport = connect(address)
            stack.push_async_callback(transport.close)
            caches.append((f"node-{number}", NodeReplicas(transport, _CLOCK, f"node-{number}")))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(cache.run()) for _, cache in caches]
            for _, cache in caches:
                await cache.wait_synced()
            print("{}", flush=True)
            while line := await asyncio.to_thread(sys.stdin.readline):
                count, is_narrow = json.loads(line)
                while not _have(caches, count, is_narrow=is_narrow):
                    await asyncio.sleep(0.02)
                print(json.dumps({"cpu": time.process_time()}), flush=True)
            for task in tasks:
                task.cancel()


def _have(caches: list[tuple[str, NodeReplicas]], count: int, *, is_narrow: bool) -> bool:
    if any(cache.is_narrow is not is_narrow for _, cache in caches):
        return False
    if is_narrow:
        return sum(len(cache.items) for _, cache in caches) == count
    # Every cache has all of them; a look at each object of each would cost more than the watches.
    if any(len(cache.items) != count for _, cache in caches):
        return False
    name, cache = caches[0]
    wanted = len(range(0, count, AGENTS))
    return sum(rank_of_node(one, name) is not None for one in cache.items.values()) == wanted


@asynccontextmanager
async def keeping_copies(transport: Transport) -> AsyncIterator[None]:
    """Lead and keep copies until the block ends."""
    specs = Informer(transport, keys.SPEC_PREFIX, decode_spec, _CLOCK)
    copies = assignment_keeper(transport, _CLOCK, specs)
    records = model_use_keeper(transport, _CLOCK, specs)
    copies.connect()
    records.connect()
    election = Election(transport, _CLOCK, key=keys.ELECTION_RECONCILER, ttl_s=60)
    leadership = await election.campaign("bench/1")
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(specs.run())]
        await specs.wait_synced()
        tasks += [group.create_task(one.lead(leadership)) for one in (copies, records)]
        yield
        for task in tasks:
            task.cancel()
    await leadership.resign()


class Agents:
    """The process of the agents' caches."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def answer(self) -> dict[str, float]:
        """Return what it says next."""
        assert self._process.stdout is not None
        async with asyncio.timeout(_LIMIT_S):
            found: dict[str, float] = json.loads(await self._process.stdout.readline())
        return found

    async def have(self, count: int, *, is_narrow: bool) -> float:
        """Wait until each cache has what it should; return the CPU seconds of the process so far."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps([count, is_narrow])}\n".encode())
        return (await self.answer())["cpu"]


async def written(
    transport: Transport, crowd: Agents, etcd: int, *, is_narrow: bool
) -> dict[str, float]:
    """Write all Replicas; return the milliseconds of CPU for each, and the seconds until every agent had its own."""
    await crowd.have(0, is_narrow=is_narrow)
    agents_s, leader_s, etcd_s = (
        await crowd.have(0, is_narrow=is_narrow),
        time.process_time(),
        _cpu_s(etcd),
    )
    began_s = time.monotonic()
    for first in range(0, REPLICAS, _BATCH):
        batch = range(first, min(first + _BATCH, REPLICAS))
        await transport.commit([], [codec.put_spec(replica(number)) for number in batch])
    agents_s = await crowd.have(REPLICAS, is_narrow=is_narrow) - agents_s
    took_s = time.monotonic() - began_s
    spent = {
        "etcd_ms": _cpu_s(etcd) - etcd_s,
        "agents_ms": agents_s,
        "leader_ms": time.process_time() - leader_s,
    }
    for first in range(0, REPLICAS, _BATCH):
        batch = range(first, min(first + _BATCH, REPLICAS))
        gone = [Delete(key=keys.spec_key("Replica", f"model-{number}")) for number in batch]
        await transport.commit([], gone)
    return {**{name: 1000 * one / REPLICAS for name, one in spent.items()}, "seconds": took_s}


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


@asynccontextmanager
async def running_agents(etcd: EmbeddedEtcd) -> AsyncIterator[Agents]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.assignments", *sys.argv[1:], str(etcd.address.socket)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    crowd = Agents(process)
    try:
        await crowd.answer()
        yield crowd
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


async def measure(folder: Path) -> dict[str, dict[str, float]]:
    """Return the medians of both ways, measured in turns."""
    etcd = EmbeddedEtcd(locate(None), folder / "etcd", _CLOCK)
    await etcd.start()
    transport, pid = connect(etcd.address), etcd.supervisor.pid
    assert pid is not None
    rounds: dict[str, list[dict[str, float]]] = {"all": [], "own": []}
    try:
        for _ in range(ROUNDS):
            async with running_agents(etcd) as crowd:
                rounds["all"].append(await written(transport, crowd, pid, is_narrow=False))
            async with keeping_copies(transport), running_agents(etcd) as crowd:
                rounds["own"].append(await written(transport, crowd, pid, is_narrow=True))
                await crowd.have(0, is_narrow=True)
    finally:
        await transport.close()
        await etcd.supervisor.stop()
    return {
        way: {name: statistics.median(one[name] for one in found) for name in found[0]}
        for way, found in rounds.items()
    }


def main() -> None:
    """Measure and print, or be the agents' process."""
    if words := arguments():
        asyncio.run(agents(EtcdAddress(socket=Path(words[-1]))))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(Path(folder)))
    for way, figures in found.items():
        print(way, {name: round(one, 2) for name, one in figures.items()}, flush=True)
    every, own = found["all"], found["own"]
    ratios = {
        f"{name.removesuffix('_ms')}_cpu_of_all": round(own[name] / max(every[name], 0.001), 3)
        for name in ("etcd_ms", "agents_ms", "leader_ms")
    }
    rounded = {way: {name: round(one, 3) for name, one in fs.items()} for way, fs in found.items()}
    finish("assignments", ratios, {"agents": AGENTS, "replicas": REPLICAS, **rounded})


if __name__ == "__main__":
    main()
