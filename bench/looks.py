"""One look of the reconciler at its fleet, through real caches: 5,000 nodes, 10,000 replicas. No etcd.

Part of `bench.placement`. What is measured is what each reconcile begins with: turning what changed in the caches
into the table that placement works on.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from datetime import UTC, datetime

from bench.harness import sized
from machinery.clock import SystemClock
from reconciler.listers.caches import Caches, make_caches
from reconciler.listers.lister import Lister
from reconciler.nodes.liveness import Now
from reconciler.nodes.node_views import NodeViewCache
from store import codec, keys
from store.memory import MemoryTransport
from store.port import Delete, Operation, Put
from tests.support.reconciler_agents import node_status, put_lease, put_node
from tests.support.world import deployment, replica

MOMENT = Now(time=datetime(2026, 1, 1, tzinfo=UTC), flapping={})
ROUNDS = sized(11, smoke=1)


def name_of(number: int) -> str:
    return f"mac-{number:05}"


def moved(number: int, node: int) -> Put:
    """Return the write of one replica, on this node now."""
    owner = deployment(name=f"d{number // 10:04}")
    return codec.put_spec(replica(number % 10, on=name_of(node), of=owner).replica)


async def write(
    transport: MemoryTransport, caches: Caches, operations: Sequence[Operation]
) -> None:
    """Write, and wait until the caches show it."""
    for at in range(0, len(operations), 100):
        part = operations[at : at + 100]
        revision = await transport.commit([], part)
        for prefix, reached in (
            (keys.SPEC_PREFIX, caches.specs.reached),
            (keys.STATUS_PREFIX, caches.statuses.reached),
            (keys.NODE_LEASE_PREFIX, caches.leases.reached),
        ):
            if any(one.key.startswith(prefix) for one in part):
                await reached(revision)


async def measure(nodes: int, replicas: int) -> dict[str, float]:
    dice, clock = random.Random(9), SystemClock()
    transport = MemoryTransport(clock)
    caches = make_caches(transport, clock)
    fleet, views = Lister(caches), NodeViewCache()

    def look() -> float:
        begin = time.process_time()
        views.refresh(fleet, MOMENT)
        return (time.process_time() - begin) * 1000

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(informer.run()) for informer in caches.all()]
        for informer in caches.all():
            await informer.wait_synced()
        names = [name_of(at) for at in range(nodes)]
        there = [put_node(name, node_status(name, memory_gib=64)) for name in names]
        await write(transport, caches, [*there, *map(put_lease, names)])
        assigned = [moved(at, dice.randrange(nodes)) for at in range(replicas)]
        await write(transport, caches, assigned)
        found = {"look_first_ms": look(), "look_unchanged_ms": look()}
        one, many, lost = [], [], []
        for at in range(ROUNDS):
            await write(transport, caches, [moved(at, at)])
            one.append(look())
            hundred = [moved(1000 + at * 100 + n, at * 100 + n) for n in range(100)]
            await write(transport, caches, hundred)
            many.append(look())
            await write(transport, caches, [Delete(key=keys.node_lease_key(name_of(at)))])
            lost.append(look())
        for task in tasks:
            task.cancel()
    return found | {
        "look_one_replica_moved_ms": statistics.median(one),
        "look_100_replicas_moved_ms": statistics.median(many),
        "look_one_node_lost_ms": statistics.median(lost),
    }


def looks(nodes: int, replicas: int) -> dict[str, float]:
    """Return milliseconds by what changed before the look."""
    return {name: round(ms, 2) for name, ms in asyncio.run(measure(nodes, replicas)).items()}
