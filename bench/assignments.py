"""Cost of one more Replica for a fleet's agents: each watches all Replicas, or its own copies below its node.

One real etcd with fsync; agents' caches with a connection each, in a process of their own; a leader that writes the
Replicas, and keeps copies in every second round. CPU for one Replica is the figure to trust. `make bench-assignments`
takes a minute; its last line is one JSON object, ratios first.
"""

import asyncio
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

from bench import agent_caches
from bench.agent_caches import AgentCaches, cpu_s, keeping_copies, running
from bench.result import arguments, finish, sized
from machinery.clock import SystemClock
from nodeagent.engines.group_launch import rank_of_node
from nodeagent.replicas.node_replicas import NodeReplicas
from schemas.deployment import ModelSource
from schemas.meta import ObjectMeta
from schemas.replica import MemoryProof, RankAssignment, Replica, ReplicaSpec
from store import codec, keys
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.etcd.member.binary import locate
from store.etcd.member.embedded import EmbeddedEtcd
from store.port import Delete, Transport

AGENTS = sized(250, smoke=4)
REPLICAS = sized(500, smoke=8)
ROUNDS = sized(3, smoke=1)
# As many Replicas in a transaction as the reconciler writes.
_BATCH = 30
_MODULE = "bench.assignments"
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
    """Run the caches of all nodes; answer once their Replicas are where they belong."""
    async with AsyncExitStack() as stack:
        caches: list[tuple[str, NodeReplicas]] = []
        for number in range(AGENTS):
            transport = connect(address)
            stack.push_async_callback(transport.close)
            caches.append((f"node-{number}", NodeReplicas(transport, _CLOCK, f"node-{number}")))
        await agent_caches.serve(
            [cache for _, cache in caches],
            lambda count, is_narrow: _have(caches, count, is_narrow=is_narrow),
        )


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


async def written(
    transport: Transport, crowd: AgentCaches, etcd: int, *, is_narrow: bool
) -> dict[str, float]:
    """Write all Replicas; return the milliseconds of CPU for each, and the seconds until every agent had its own."""
    await crowd.have(0, is_narrow=is_narrow)
    agents_s, leader_s, etcd_s = (
        await crowd.have(0, is_narrow=is_narrow),
        time.process_time(),
        cpu_s(etcd),
    )
    began_s = time.monotonic()
    for first in range(0, REPLICAS, _BATCH):
        batch = range(first, min(first + _BATCH, REPLICAS))
        await transport.commit([], [codec.put_spec(replica(number)) for number in batch])
    agents_s = await crowd.have(REPLICAS, is_narrow=is_narrow) - agents_s
    took_s = time.monotonic() - began_s
    spent = {
        "etcd_ms": cpu_s(etcd) - etcd_s,
        "agents_ms": agents_s,
        "leader_ms": time.process_time() - leader_s,
    }
    for first in range(0, REPLICAS, _BATCH):
        batch = range(first, min(first + _BATCH, REPLICAS))
        gone = [Delete(key=keys.spec_key("Replica", f"model-{number}")) for number in batch]
        await transport.commit([], gone)
    return {**{name: 1000 * one / REPLICAS for name, one in spent.items()}, "seconds": took_s}


async def measure(folder: Path) -> dict[str, dict[str, float]]:
    """Return the medians of both ways, measured in turns."""
    etcd = EmbeddedEtcd(locate(None), folder / "etcd", _CLOCK)
    await etcd.start()
    transport, pid = connect(etcd.address), etcd.supervisor.pid
    assert pid is not None
    rounds: dict[str, list[dict[str, float]]] = {"all": [], "own": []}
    try:
        for _ in range(ROUNDS):
            async with running(_MODULE, etcd) as crowd:
                rounds["all"].append(await written(transport, crowd, pid, is_narrow=False))
            async with keeping_copies(transport), running(_MODULE, etcd) as crowd:
                rounds["own"].append(await written(transport, crowd, pid, is_narrow=True))
                await crowd.have(0, is_narrow=True)
    finally:
        await transport.close()
        await etcd.supervisor.stop()
    return agent_caches.medians(rounds)


def main() -> None:
    """Measure and print, or be the agents' process."""
    if words := arguments():
        asyncio.run(agents(EtcdAddress(socket=Path(words[-1]))))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(Path(folder)))
    every, own = found["all"], found["own"]
    ratios = {
        f"{name.removesuffix('_ms')}_cpu_of_all": round(own[name] / max(every[name], 0.001), 3)
        for name in ("etcd_ms", "agents_ms", "leader_ms")
    }
    rounded = {way: {name: round(one, 3) for name, one in fs.items()} for way, fs in found.items()}
    finish("assignments", ratios, {"agents": AGENTS, "replicas": REPLICAS, **rounded})


if __name__ == "__main__":
    main()
