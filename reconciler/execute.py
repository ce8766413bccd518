"""Carries out actions and status writes: guarded transactions, many writes in one, fenced by the leadership."""

import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing

from machinery.clock import Clock
from reconciler.actions import Action
from reconciler.writes import (
    GuardedWrite,
    WriteContext,
    guards_of,
    make_write,
    operations_of,
    split_into_batches,
    status_write,
)
from schemas.deployment import ModelDeployment
from schemas.meta import ObjectKey, ObjectMeta, Status
from schemas.node import Node, NodeLifeStatus, NodeSpec
from schemas.replica import Replica
from store import codec, keys
from store.errors import ConflictError
from store.port import Delete, Guard, KeyValue, ModRevisionGuard, Put, Transport

# The fence, and the ledger as guard and as operation.
_SHARED = 3
# What an epoch's ranks know each other by: nobody guesses 256 bits.
_SECRET_BYTES = 32


class Executor:
    """Writes for the leader; `fence` is the guard of its leadership.

    Raises the store's errors; a ConflictError says that the plan was made from old news.
    """

    def __init__(self, transport: Transport, clock: Clock, fence: Callable[[], Guard]) -> None:
        """Write by the clock's time. Secrets are drawn here, by the system: no plan has any."""
        self._transport = transport
        self._clock = clock
        self._fence = fence
        self._ledger: KeyValue | None = None
        self._assigned_at = 0

    async def last_assignment(self) -> int:
        """Return the revision that the cache must show before a plan made from it assigns anything.

        Each assignment also writes the election key, guarded by the version we know. So one whose
        answer was lost, and that is carried out late, and one that was planned without it cannot
        both happen: together they could put more on a node than it has.
        """
        if self._ledger is None:
            ledger = await self._transport.get(self._fence().key)
            if ledger is None:
                raise ConflictError("the lead is lost")
            if ledger.mod_revision > ledger.create_revision:
                self._assigned_at = ledger.mod_revision  # by one of ours, be its answer lost or not
            else:
                # After the ledger: what is assigned between the two makes our next write a conflict.
                there = await self._transport.list(keys.spec_prefix("Replica"))
                self._assigned_at = max((item.mod_revision for item in there.items), default=0)
            self._ledger = ledger
        return self._assigned_at

    async def do(
        self, action: Action, deployment: ModelDeployment | None, replicas: Mapping[str, Replica]
    ) -> int:
        """Carry out one action; return the revision at which it was written."""
        return await self._commit((make_write(action, deployment, replicas, self._stamp()),))

    async def do_all(
        self,
        actions: Sequence[Action],
        deployment: ModelDeployment | None,
        replicas: Mapping[str, Replica],
    ) -> AsyncGenerator[tuple[Sequence[Action], int]]:
        """Carry out a plan, many actions at once; yield what was done, and at which revision."""
        stamp = self._stamp()
        writes = [make_write(action, deployment, replicas, stamp) for action in actions]
        done = 0
        async with aclosing(self._in_batches(writes)) as batched:
            async for number, revision in batched:
                yield actions[done : done + number], revision
                done += number

    def _stamp(self) -> WriteContext:
        return WriteContext(
            now=self._clock.now(), secret=lambda: secrets.token_urlsafe(_SECRET_BYTES)
        )

    async def write_status(self, key: ObjectKey, status: Status, *, version: int) -> int:
        """Write a status, if its object is still what it was computed from; return the revision."""
        return await self._commit((status_write(key, status, version=version),))

    async def write_statuses(self, found: Iterable[tuple[ObjectKey, Status, int]]) -> None:
        """Write statuses, each with the version of the object that it was computed from."""
        writes = [status_write(key, status, version=version) for key, status, version in found]
        async with aclosing(self._in_batches(writes)) as batched:
            async for _ in batched:
                pass

    async def _in_batches(self, writes: Iterable[GuardedWrite]) -> AsyncGenerator[tuple[int, int]]:
        """Commit the writes in order; yield how many were done at which revision.

        A batch of which something is refused is tried one by one, up to what is: what comes before it must not
        wait for what may never be done.
        """
        for batch in split_into_batches(writes, shared=_SHARED):
            try:
                revision = await self._commit(batch)
            except ConflictError:
                if len(batch) == 1:
                    raise
                for write in batch:
                    yield 1, await self._commit((write,))
            else:
                yield len(batch), revision

    async def _commit(self, batch: Sequence[GuardedWrite]) -> int:
        guards, operations = [self._fence(), *guards_of(batch)], operations_of(batch)
        if not any(write.is_assignment for write in batch):
            return await self._transport.commit(guards, operations)
        ledger, self._ledger = self._ledger, None  # known again when the answer is in
        if ledger is None:
            raise ConflictError("something may have been assigned that the plan did not count")
        guards.append(ModRevisionGuard(key=ledger.key, mod_revision=ledger.mod_revision))
        entry = Put(key=ledger.key, value=ledger.value, lease=ledger.lease)
        try:
            self._assigned_at = await self._transport.commit(guards, [*operations, entry])
        except ConflictError:
            if len(batch) > 1:
                self._ledger = ledger  # refused for good: none of it can still be carried out late
            raise
        self._ledger = ledger._replace(mod_revision=self._assigned_at)
        return self._assigned_at

    async def write_life(
        self, node: str, life: NodeLifeStatus, *, version: int, registered: int
    ) -> int:
        """Write what was found out about a node, unless the node, or what was known of it, changed meanwhile."""
        put = Put(key=keys.node_life_key(node), value=codec.encode(life))
        guards = [
            self._fence(),
            ModRevisionGuard(key=put.key, mod_revision=version),
            ModRevisionGuard(key=keys.spec_key("Node", node), mod_revision=registered),
        ]
        return await self._transport.commit(guards, [put])

    async def remove_life(self, node: str, *, version: int) -> int:
        """Remove what was found out about a node that is gone."""
        key = keys.node_life_key(node)
        guards = [self._fence(), ModRevisionGuard(key=key, mod_revision=version)]
        return await self._transport.commit(guards, [Delete(key=key)])

    async def sweep(self, key: str, *, version: int, owner: str) -> int:
        """Remove a document whose object, under the key `owner`, is not there."""
        guards = [
            self._fence(),
            ModRevisionGuard(key=owner, mod_revision=0),
            ModRevisionGuard(key=key, mod_revision=version),
        ]
        return await self._transport.commit(guards, [Delete(key=key)])

    async def register_node(self, name: str, uid: str) -> None:
        """Write the spec of a node that joined, unless somebody did."""
        metadata = ObjectMeta(
            name=name, uid=uid, generation=1, creation_timestamp=self._clock.now()
        )
        put = codec.put_spec(Node(metadata=metadata, spec=NodeSpec()))
        guards = [self._fence(), ModRevisionGuard(key=put.key, mod_revision=0)]
        await self._transport.commit(guards, [put])
