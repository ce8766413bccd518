"""A store with the reconciler's caches, and a store with a leader that writes to it."""

import asyncio
from collections.abc import Mapping
from contextlib import aclosing

from machinery.clock import SystemClock
from reconciler.deployments.actions import Action
from reconciler.deployments.execute import Executor
from reconciler.listers.caches import make_caches
from reconciler.listers.lister import Lister
from schemas.deployment import ModelDeployment
from schemas.meta import ApiObject, ObjectMeta, Status
from schemas.pools import NodePool, NodePoolSpec
from schemas.replica import Replica
from store import codec, keys, objects
from store.memory import MemoryTransport
from store.port import CreateRevisionGuard, Delete, Operation, Put
from tests.support.clock import FakeClock
from tests.support.reconciler_agents import put_rank


class CachedStore:
    """A store, and the caches of it."""

    def __init__(self) -> None:
        clock = SystemClock()
        self.transport = MemoryTransport(clock)
        self.caches = make_caches(self.transport, clock)
        self.fleet = Lister(self.caches)

    async def write(self, *operations: Operation) -> None:
        """Write, and wait until the caches show it."""
        revision = await self.transport.commit([], operations)
        keys_written = [operation.key for operation in operations]
        informers = (
            (keys.SPEC_PREFIX, self.caches.specs.reached),
            (keys.STATUS_PREFIX, self.caches.statuses.reached),
            (keys.RANK_PREFIX, self.caches.ranks.reached),
            (keys.NODE_LEASE_PREFIX, self.caches.leases.reached),
            (keys.ENDPOINT_PREFIX, self.caches.endpoints.reached),
        )
        async with asyncio.timeout(30):
            for prefix, reached in informers:
                if any(key.startswith(prefix) for key in keys_written):
                    await reached(revision)

    async def have(self, *objects: ApiObject) -> None:
        await self.write(*(codec.put_spec(obj) for obj in objects))


def pool(name: str, **spec: object) -> NodePool:
    return NodePool(metadata=ObjectMeta(name=name), spec=NodePoolSpec.model_validate(spec))


ELECTION = keys.ELECTION_RECONCILER


class LeaderStore:
    """A store, and a leader that writes to it."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.transport = MemoryTransport(self.clock)
        self.epoch = 0
        self.executor = Executor(
            self.transport,
            self.clock,
            lambda: CreateRevisionGuard(key=ELECTION, create_revision=self.epoch),
        )

    async def lead(self) -> None:
        self.epoch = await self.transport.commit([], [Put(key=ELECTION, value=b"me")])
        await self.executor.last_assignment()

    async def lose(self) -> None:
        """Let another process lead, without notice to this one."""
        await self.transport.commit([], [Delete(key=ELECTION)])
        await self.transport.commit([], [Put(key=ELECTION, value=b"another")])

    async def have(self, found: ModelDeployment) -> ModelDeployment:
        await self.transport.commit([], [codec.put_spec(found)])
        there = await objects.get(self.transport, ModelDeployment, found.name)
        assert there is not None
        return there

    async def have_replica(self, found: Replica) -> int:
        put = [codec.put_spec(found), put_rank(found)]
        status = Put(key=keys.status_key("Replica", found.name), value=codec.encode(Status()))
        return await self.transport.commit([], [*put, status])

    async def replica(self) -> Replica | None:
        return await objects.get(self.transport, Replica, "qwen-0")

    async def keys(self) -> set[str]:
        """Return all keys of the store except the election."""
        listing = await self.transport.list(keys.ROOT)
        return {item.key.removeprefix(keys.ROOT) for item in listing.items} - {
            ELECTION.removeprefix(keys.ROOT)
        }


async def do(
    executor: Executor,
    action: Action,
    deployment: ModelDeployment | None,
    replicas: Mapping[str, Replica],
) -> int:
    """Execute one action; return the revision of the write."""
    async with aclosing(executor.do_all([action], deployment, replicas)) as batches:
        return [revision async for _, revision in batches][-1]
