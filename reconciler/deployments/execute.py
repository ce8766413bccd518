"""Executes actions and status writes as guarded transactions, many writes in one, fenced by the leadership."""

import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing

from machinery.clock import Clock
from reconciler.deployments.actions import Action
from reconciler.deployments.writes import (
    GuardedWrite,
    WriteContext,
    documents_of,
    guards_of,
    make_write,
    operations_of,
    split_into_batches,
    status_write,
)
from reconciler.listers.own_writes import OwnWrites
from reconciler.metrics import ReconcilerMetrics
from schemas.deployment import ModelDeployment
from schemas.meta import ObjectKey, Status
from schemas.replica import Replica
from store import keys
from store.errors import ConflictError
from store.port import Guard, KeyValue, ModRevisionGuard, Operation, Put, Transport

# The fence, and the ledger as guard and as operation.
_SHARED = 3
# Size of the secret that the ranks of an epoch share.
_SECRET_BYTES = 32


class Executor:
    """Writes to the store for the leader; `fence` returns the guard of its leadership.

    Raises the store's errors. A ConflictError means that the plan was made from outdated objects.
    """

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        fence: Callable[[], Guard],
        metrics: ReconcilerMetrics | None = None,
        *,
        own_writes: OwnWrites | None = None,
    ) -> None:
        """Write with the clock's time. Secrets are drawn here, never in a plan."""
        self._own_writes = own_writes or OwnWrites()
        self._transport = transport
        self._metrics = metrics or ReconcilerMetrics(clock)
        self._clock = clock
        self._fence = fence
        self._ledger: KeyValue | None = None
        self._assigned_at = 0

    async def last_assignment(self) -> int:
        """Return the revision that the cache must show before a plan that is made from it may assign anything.

        Each assignment also writes the election key, the ledger, guarded by its known version. An assignment whose
        answer was lost may be carried out late. Because of the ledger, it and an assignment that was planned without
        it cannot both succeed; together they could exceed the memory of a node.
        """
        if self._ledger is None:
            ledger = await self._transport.get(self._fence().key)
            if ledger is None:
                raise ConflictError("this process is no longer the leader")
            if ledger.mod_revision > ledger.create_revision:
                self._assigned_at = (
                    ledger.mod_revision
                )  # by one of our writes, even if its answer was lost
            else:
                # Read after the ledger: an assignment between the two reads makes our next write a conflict.
                replicas = await self._transport.list(keys.spec_prefix("Replica"))
                self._assigned_at = max((item.mod_revision for item in replicas.items), default=0)
            self._ledger = ledger
        return self._assigned_at

    async def do_all(
        self,
        actions: Sequence[Action],
        deployment: ModelDeployment | None,
        replicas: Mapping[str, Replica],
        *,
        owner: str = "",
    ) -> AsyncGenerator[tuple[Sequence[Action], int]]:
        """Execute a plan, many actions in one transaction; yield the done actions and their revision.

        `owner` is the deployment whose reconcile these writes are no news for (`OwnWrites`).
        """
        stamp = WriteContext(
            now=self._clock.now(), secret=lambda: secrets.token_urlsafe(_SECRET_BYTES)
        )
        writes = [make_write(action, deployment, replicas, stamp) for action in actions]
        done = 0
        async with aclosing(self._in_batches(writes, owner)) as batched:
            async for number, revision in batched:
                for action in actions[done : done + number]:
                    self._metrics.actions.add(type(action).__name__)
                yield actions[done : done + number], revision
                done += number

    async def write_status(
        self, key: ObjectKey, status: Status, *, version: int, owner: str = ""
    ) -> int:
        """Write a status if its object has not changed since; return the revision. `owner`: as for `do_all`."""
        return await self._commit((status_write(key, status, version=version),), owner)

    async def write_statuses(
        self, found: Iterable[tuple[ObjectKey, Status, int]], *, owner: str = ""
    ) -> int:
        """Write statuses, each with the version of the object that it was computed from; return the last revision.

        `owner`: as for `do_all`. Without any statuses the revision is 0.
        """
        writes = [status_write(key, status, version=version) for key, status, version in found]
        last = 0
        async with aclosing(self._in_batches(writes, owner)) as batched:
            async for _, revision in batched:
                last = revision
        return last

    async def _in_batches(
        self, writes: Iterable[GuardedWrite], owner: str
    ) -> AsyncGenerator[tuple[int, int]]:
        """Commit the writes in order; yield the number of writes in each transaction and its revision.

        A refused batch is committed write by write until the refused one: the writes before it must not wait for one
        that may never succeed.
        """
        for batch in split_into_batches(writes, shared=_SHARED):
            try:
                revision = await self._commit(batch, owner)
            except ConflictError:
                if len(batch) == 1:
                    raise
                for write in batch:
                    yield 1, await self._commit((write,), owner)
            else:
                yield len(batch), revision

    async def _write(
        self, guards: Sequence[Guard], operations: Sequence[Operation], owner: str = ""
    ) -> int:
        with self._metrics.writing(), self._own_writes.writing(owner) as note:
            revision = await self._transport.commit(guards, operations)
            note(revision)
            return revision

    async def commit(self, guards: Sequence[Guard], operations: Sequence[Operation]) -> int:
        """Write something else for the leader; return the revision."""
        return await self._write([self._fence(), *guards], operations)

    async def _commit(self, batch: Sequence[GuardedWrite], owner: str = "") -> int:
        guards, operations = [self._fence(), *guards_of(batch)], operations_of(batch)
        self._own_writes.expect(documents_of(batch))
        if not any(write.is_assignment for write in batch):
            return await self._write(guards, operations, owner)
        ledger, self._ledger = self._ledger, None  # known again when the answer arrives
        if ledger is None:
            raise ConflictError("an assignment that the plan did not count may have been written")
        guards.append(ModRevisionGuard(key=ledger.key, mod_revision=ledger.mod_revision))
        entry = Put(key=ledger.key, value=ledger.value, lease=ledger.lease)
        try:
            self._assigned_at = await self._write(guards, [*operations, entry], owner)
        except ConflictError:
            if len(batch) > 1:
                self._ledger = ledger  # refused for certain: nothing of it can happen late
            raise
        self._ledger = ledger._replace(mod_revision=self._assigned_at)
        return self._assigned_at
