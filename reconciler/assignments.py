"""Copies of Replicas below the nodes that they concern, which the leader keeps for agents.

An agent needs its own Replicas only. If it watched all of them, etcd would send each write to every Mac of the fleet:
docs/adr/0105-assignments-below-their-node.md has the measurement and the rules.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator
from contextlib import aclosing
from typing import Final, NamedTuple

from machinery.backoff import Backoff, Retries
from machinery.clock import Clock
from reconciler.writes import GuardedWrite, guards_of, operations_of, split_into_batches
from schemas.meta import ApiObject
from schemas.replica import Replica, concerned_nodes
from store import codec, keys
from store.errors import ConflictError, PermissionDeniedError, StoreError
from store.informer import Informer
from store.leases import Leadership
from store.port import Delete, ModRevisionGuard, Put, Transport

log = logging.getLogger(__name__)

_BACKOFF: Final = Backoff(first_s=0.05, limit_s=5.0)
# The fence.
_SHARED: Final = 1
_REPLICAS: Final = keys.spec_prefix("Replica")


class Copies(NamedTuple):
    """The copies of one Replica in the store."""

    revision: int
    """Of the oldest of them; -1 if it is not known what was written."""
    nodes: frozenset[str]

    def is_current(self, version: int, nodes: frozenset[str]) -> bool:
        """Return whether they are those of the Replica's version, and below just these nodes.

        Each copy is written while the Replica has the version that is copied. So a copy that is newer than the
        Replica is a copy of its present version.
        """
        return self.nodes == nodes and (not nodes or self.revision > version)


_NONE: Final = Copies(0, frozenset())


class _Due(NamedTuple):
    """A Replica whose copies are to be written."""

    name: str
    nodes: frozenset[str]
    write: GuardedWrite


class AssignmentCopies:
    """Keeps the copies. `connect()` once; `lead()` while this process leads."""

    def __init__(self, transport: Transport, clock: Clock, specs: Informer[ApiObject]) -> None:
        """`specs` holds all Replicas."""
        self._transport = transport
        self._specs = specs
        self._retries = Retries(_BACKOFF, clock)
        self._due: set[str] = set()
        """The names of Replicas that may have changed since their copies were written."""
        self._noted = asyncio.Event()
        self._is_leading = False
        self._copies: dict[str, Copies] = {}

    def connect(self) -> None:
        """Follow changes of the cache."""
        self._specs.on_change(self._note)

    def _note(self, key: str) -> None:
        if self._is_leading and key.startswith(_REPLICAS):
            self._due.add(key.removeprefix(_REPLICAS))
            self._noted.set()

    async def lead(self, leadership: Leadership) -> None:
        """Write copies of what changes, forever; once all are right, mark them as kept while the leadership lasts."""
        self._is_leading = True
        try:
            await self._keep(leadership)
        finally:
            self._is_leading = False

    async def _keep(self, leadership: Leadership) -> None:
        is_read = is_marked = False
        while True:
            self._noted.clear()
            try:
                if not is_read:
                    await self._read()
                    is_read = True
                await self._write(leadership)
                if not is_marked:
                    await self._mark(leadership)
                    is_marked = True
            except StoreError as error:
                is_refused = isinstance(error, PermissionDeniedError)
                self._complain(error, is_refused=is_refused)
                await self._retries.wait(is_refused=is_refused)
                continue
            self._retries.reset()
            await self._noted.wait()

    def _complain(self, error: StoreError, *, is_refused: bool) -> None:
        is_news = is_refused and self._retries.failures == 0
        log.log(
            logging.WARNING if is_news else logging.INFO,
            "copies of replicas for agents are not written, so agents watch all replicas"
            if is_refused
            else "copies of replicas for agents wait",
            extra={
                "why": str(error),
                **({"do": "fleetctl init-auth --prepare"} if is_refused else {}),
            },
        )

    async def _read(self) -> None:
        """Read which copies there are; everything is due."""
        found: dict[str, Copies] = {}
        async with aclosing(self._transport.pages(keys.ASSIGNMENT_PREFIX)) as pages:
            async for page in pages:
                for item in page.items:
                    node, _, name = item.key.removeprefix(keys.ASSIGNMENT_PREFIX).partition("/")
                    one = found.get(name, Copies(item.mod_revision, frozenset()))
                    oldest = min(one.revision, item.mod_revision)
                    found[name] = Copies(oldest, one.nodes | {node})
        self._copies = found
        self._due.update(found)
        self._due.update(
            key.removeprefix(_REPLICAS) for key in self._specs.items if key.startswith(_REPLICAS)
        )

    async def _write(self, leadership: Leadership) -> None:
        """Write what is due, many Replicas in one transaction. Raises StoreError; what failed stays due."""
        due, self._due = self._due, set()
        todo = list(self._due_writes(due))
        failed: StoreError | None = None
        for batch in split_into_batches((write.write for write in todo), shared=_SHARED):
            names, todo = todo[: len(batch)], todo[len(batch) :]
            try:
                if failed is None or isinstance(failed, ConflictError):
                    await self._commit(leadership, names)
                    continue
            except StoreError as error:
                failed = error
            self._due.update(one.name for one in names if not self._is_current(one.name))
        if failed is not None:
            raise failed

    async def _commit(self, leadership: Leadership, batch: list[_Due]) -> None:
        """Write a batch; if a Replica of it has changed, one by one, so that it does not hold up the others."""
        try:
            await self._transaction(leadership, batch)
        except ConflictError:
            if len(batch) == 1:
                raise
            refused: ConflictError | None = None
            for one in batch:
                try:
                    await self._transaction(leadership, [one])
                except ConflictError as error:
                    refused = error
            if refused is not None:
                raise refused from None

    async def _transaction(self, leadership: Leadership, batch: list[_Due]) -> None:
        writes = [one.write for one in batch]
        for one in batch:
            # Until the answer arrives, any of them may have been written.
            before = self._copies.get(one.name, _NONE)
            self._copies[one.name] = Copies(-1, before.nodes | one.nodes)
        revision = await self._transport.commit(
            [leadership.guard, *guards_of(writes)], operations_of(writes)
        )
        for one in batch:
            if one.nodes:
                self._copies[one.name] = Copies(revision, one.nodes)
            else:
                del self._copies[one.name]

    def _is_current(self, name: str) -> bool:
        nodes, version = self._wanted(name)
        return self._copies.get(name, _NONE).is_current(version, nodes)

    def _wanted(self, name: str) -> tuple[frozenset[str], int]:
        """Return the nodes that need a copy of the Replica, and its version; none and 0 if there is no such Replica."""
        key = f"{_REPLICAS}{name}"
        found = self._specs.items.get(key)
        if not isinstance(found, Replica):
            return frozenset(), self._specs.version(key)
        return frozenset(concerned_nodes(found)), self._specs.version(key)

    def _due_writes(self, names: Iterable[str]) -> Iterator[_Due]:
        for name in names:
            key = f"{_REPLICAS}{name}"
            # What a newer reconciler wrote cannot be copied; its agents' copies stay as they are.
            if key in self._specs.undecodable or self._is_current(name):
                continue
            nodes, version = self._wanted(name)
            found = self._specs.items.get(key)
            value = codec.encode_copy(found) if nodes and found is not None else b""
            gone = self._copies.get(name, _NONE).nodes - nodes
            write = GuardedWrite(
                guards=(ModRevisionGuard(key=key, mod_revision=version),),
                operations=(
                    *(Put(key=keys.assignment_key(node, name), value=value) for node in nodes),
                    *(Delete(key=keys.assignment_key(node, name)) for node in gone),
                ),
            )
            yield _Due(name, nodes, write)

    async def _mark(self, leadership: Leadership) -> None:
        """Say that all copies are kept; the mark ends with the leadership."""
        put = Put(key=keys.ASSIGNMENTS_KEPT, value=b"1", lease=leadership.lease)
        await self._transport.commit([leadership.guard], [put])
