"""Copies of Replicas below their nodes: a leader that keeps them, and what is in the store."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from machinery.clock import SystemClock
from reconciler.listers.caches import decode_spec
from reconciler.services.assignments import assignment_keeper
from reconciler.services.kept_records import RecordKeeper
from schemas.replica import LeavingRank, RankAssignment, Replica
from store import codec, keys
from store.informer import Informer
from store.leases import Election, Leadership
from store.port import Transport
from tests.support.nodeagent_plans import PROOF, wanted
from tests.support.waiting import until_async

CLOCK = SystemClock()


def replica(name: str, *nodes: str, leaving: tuple[str, ...] = ()) -> Replica:
    found = wanted()
    ranks = tuple(RankAssignment(node=node, memory=PROOF) for node in nodes)
    leaving_ranks = tuple(LeavingRank(node=node, rank=1, memory_bytes=1) for node in leaving)
    spec = found.spec.model_copy(update={"ranks": ranks, "leaving": leaving_ranks})
    metadata = found.metadata.model_copy(update={"name": name})
    return found.model_copy(update={"metadata": metadata, "spec": spec})


@asynccontextmanager
async def leading(
    store: Transport, keeper: Callable[..., RecordKeeper] = assignment_keeper
) -> AsyncIterator[Leadership]:
    """Lead, and keep the copies that the keeper makes, until the block ends."""
    specs = Informer(store, keys.SPEC_PREFIX, decode_spec, CLOCK)
    copies = keeper(store, CLOCK, specs)
    copies.connect()
    election = Election(store, CLOCK, key=keys.ELECTION_RECONCILER, ttl_s=60)
    leadership = await election.campaign("host/1 0.1.0")
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(specs.run())]
        await specs.wait_synced()
        tasks.append(group.create_task(copies.lead(leadership)))
        try:
            yield leadership
        finally:
            for task in tasks:
                task.cancel()
    await leadership.resign()


async def copies_in(store: Transport) -> dict[str, Replica]:
    """Return the copies by `<node>/<replica>`, without those that cannot be decoded."""
    replicas: dict[str, Replica] = {}
    for item in (await store.list(keys.ASSIGNMENT_PREFIX)).items:
        with contextlib.suppress(codec.UndecodableError):
            place = item.key.removeprefix(keys.ASSIGNMENT_PREFIX)
            replicas[place] = codec.decode_copy(Replica, item)
    return replicas


async def write(store: Transport, *replicas: Replica) -> None:
    await store.commit([], [codec.put_spec(one) for one in replicas])


async def stored(store: Transport, name: str) -> Replica | None:
    item = await store.get(keys.spec_key("Replica", name))
    return None if item is None else codec.decode_object(Replica, item)


async def until_copied(store: Transport, *places: str) -> dict[str, Replica]:
    """Wait until there are copies at these places only, each as its Replica is now; return them."""

    async def found() -> dict[str, Replica] | None:
        seen = await copies_in(store)
        is_equal = [one == await stored(store, one.name) for one in seen.values()]
        return seen if sorted(seen) == sorted(places) and all(is_equal) else None

    if places:
        return await until_async(found, what=f"copies at {places}")

    async def none() -> bool:
        return not await copies_in(store)

    await until_async(none, what="no copies")
    return {}


async def is_marked(store: Transport) -> bool:
    return await store.get(keys.ASSIGNMENTS_KEPT) is not None
