"""Copies of Replicas below the nodes that they concern, which the leader keeps for agents.

An agent needs its own Replicas only. If it watched all of them, etcd would send each write to every Mac of the fleet:
docs/adr/0004-one-writer-per-key.md has the measurement and the rules.
"""

from collections.abc import Iterable, Iterator
from contextlib import aclosing
from typing import Final, NamedTuple

from machinery.clock import Clock
from reconciler.deployments.execute import (
    GuardedWrite,
    merge_writes,
    split_into_batches,
)
from reconciler.services.kept_records import RecordKeeper, RecordLabels
from schemas.meta import ApiObject
from schemas.replica import Replica, concerned_nodes
from store import codec, keys
from store.errors import ConflictError
from store.informer import Informer
from store.leases import Leadership
from store.port import Delete, ModRevisionGuard, Put, Transport

_LABELS: Final = RecordLabels(
    refused="copies of replicas for agents are not written, so agents watch all replicas",
    waits="copies of replicas for agents wait",
    kept_key=keys.ASSIGNMENTS_KEPT,
)
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
    """A `RecordSource` by the names of Replicas: compares and writes the copies."""

    def __init__(self, transport: Transport, specs: Informer[ApiObject]) -> None:
        """`specs` holds all Replicas."""
        self._transport = transport
        self._specs = specs
        self._copies: dict[str, Copies] = {}

    def names_of(self, key: str) -> tuple[str, ...]:
        """Return the Replica under a spec key."""
        return (key.removeprefix(_REPLICAS),) if key.startswith(_REPLICAS) else ()

    async def read(self) -> set[str]:
        """Read which copies there are; return the names of all Replicas, and of those that have copies."""
        found: dict[str, Copies] = {}
        async with aclosing(self._transport.pages(keys.ASSIGNMENT_PREFIX)) as pages:
            async for page in pages:
                for item in page.items:
                    node, _, name = item.key.removeprefix(keys.ASSIGNMENT_PREFIX).partition("/")
                    copies = found.get(name, Copies(item.mod_revision, frozenset()))
                    oldest = min(copies.revision, item.mod_revision)
                    found[name] = Copies(oldest, copies.nodes | {node})
        self._copies = found
        there = {
            key.removeprefix(_REPLICAS) for key in self._specs.items if key.startswith(_REPLICAS)
        }
        return there.union(found)

    async def write(self, leadership: Leadership, names: Iterable[str]) -> None:
        """Write the copies that are wrong, many Replicas in one transaction; raises StoreError after the last."""
        todo = list(self._due_writes(names))
        failed: ConflictError | None = None
        for batch in split_into_batches((write.write for write in todo), shared=_SHARED):
            part, todo = todo[: len(batch)], todo[len(batch) :]
            try:
                await self._commit(leadership, part)
            except ConflictError as error:
                failed = error
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
            for write in batch:
                try:
                    await self._transaction(leadership, [write])
                except ConflictError as error:
                    refused = error
            if refused is not None:
                raise refused from None

    async def _transaction(self, leadership: Leadership, batch: list[_Due]) -> None:
        writes = [due.write for due in batch]
        for write in batch:
            # Until the answer arrives, any of them may have been written.
            before = self._copies.get(write.name, _NONE)
            self._copies[write.name] = Copies(-1, before.nodes | write.nodes)
        guards, operations = merge_writes(writes)
        revision = await self._transport.commit([leadership.guard, *guards], operations)
        for due in batch:
            if due.nodes:
                self._copies[due.name] = Copies(revision, due.nodes)
            else:
                del self._copies[due.name]

    def _due_writes(self, names: Iterable[str]) -> Iterator[_Due]:
        for name in names:
            key = f"{_REPLICAS}{name}"
            # What a newer reconciler wrote cannot be copied; its agents' copies stay as they are.
            if key in self._specs.undecodable:
                continue
            version, api_object = self._specs.version(key), self._specs.items.get(key)
            nodes, value = frozenset[str](), b""
            if isinstance(api_object, Replica):
                nodes = frozenset(concerned_nodes(api_object))
            copies = self._copies.get(name, _NONE)
            if copies.is_current(version, nodes):
                continue
            if api_object is not None:
                value = codec.encode_copy(api_object)
            gone = copies.nodes - nodes
            write = GuardedWrite(
                guards=(ModRevisionGuard(key=key, mod_revision=version),),
                operations=(
                    *(Put(key=keys.assignment_key(node, name), value=value) for node in nodes),
                    *(Delete(key=keys.assignment_key(node, name)) for node in gone),
                ),
            )
            yield _Due(name, nodes, write)


def assignment_keeper(
    transport: Transport, clock: Clock, specs: Informer[ApiObject]
) -> RecordKeeper:
    """Return the keeper of the copies; `specs` holds all Replicas."""
    return RecordKeeper(transport, clock, specs, AssignmentCopies(transport, specs), _LABELS)
