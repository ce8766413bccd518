"""The tracker: which agents have the files of a model, and which one may ask the hub for a file.

Each agent writes below its own prefix only, under its node's lease. The nodes that want a file form a queue, ordered by
the revision at which their keys were created, as in etcd's own recipe for locks: no key is contended, and when a node
dies its key goes with the lease and the next one is first.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

from machinery.backoff import Backoff, Retries
from machinery.clock import Clock
from schemas.blob_share import FetchClaim, ModelOffer
from store import codec, keys
from store.errors import PermissionDeniedError, StoreError
from store.informer import Informer
from store.port import MAX_OPERATIONS, Delete, KeyValue, Operation, Put, Transport

log = logging.getLogger(__name__)

_BACKOFF: Final = Backoff(first_s=0.2, limit_s=5.0)
_LEASE_POLL_S: Final = 0.5
_FIRST_LIST_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class ShareEntry:
    """One key of the tracker, and the revision at which it was created."""

    document: ModelOffer | FetchClaim
    created: int


def _decode(item: KeyValue) -> ShareEntry:
    if keys.share_parts(item.key)[1] == "fetch":
        return ShareEntry(codec.decode(FetchClaim, item), item.create_revision)
    return ShareEntry(codec.decode(ModelOffer, item), item.create_revision)


class ShareTracker:
    """Offers and claims of one agent, and those of the others. `run()` must run."""

    def __init__(self, transport: Transport, clock: Clock, *, node: str) -> None:
        self._transport = transport
        self._clock = clock
        self.node: Final = node
        self._wanted: dict[str, bytes] = {}
        self._written: dict[str, bytes] = {}
        self._changed = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._running = asyncio.Event()
        self._users = 0
        self._informer: Informer[ShareEntry] | None = None
        self._watching: asyncio.Task[None] | None = None

    def say(self, key: str, document: ModelOffer | FetchClaim) -> None:
        """Keep a key of this node in the store."""
        self._wanted[key] = codec.encode(document)
        self._changed.set()

    def withdraw(self, key: str) -> None:
        """Remove a key of this node from the store."""
        if self._wanted.pop(key, None) is not None:
            self._changed.set()

    def said(self, what: str) -> tuple[str, ...]:
        """Return the names of this node's keys of a kind."""
        found = (keys.share_parts(key) for key in self._wanted)
        return tuple(name for _, kind, name in found if kind == what)

    async def run(self, lease: Callable[[], int | None]) -> None:
        """Write this node's keys under its lease, forever; again under each new one."""
        retries = Retries(_BACKOFF, self._clock)
        held = 0
        async with asyncio.TaskGroup() as self._group:
            self._running.set()
            while True:
                current = lease()
                if current is not None and current != held:
                    held = current
                    self._written.clear()
                try:
                    if current is not None:
                        await self._write(current)
                except StoreError as error:
                    log.debug("offers not written", extra={"why": str(error)})
                    await retries.wait(is_refused=isinstance(error, PermissionDeniedError))
                    continue
                retries.reset()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LEASE_POLL_S):
                        await self._changed.wait()
                self._changed.clear()

    async def _write(self, lease: int) -> None:
        wanted = dict(self._wanted)
        gone = [key for key in self._written if key not in wanted]
        operations: list[Operation] = [Delete(key=key) for key in gone]
        operations += [
            Put(key=key, value=value, lease=lease)
            for key, value in wanted.items()
            if self._written.get(key) != value
        ]
        for start in range(0, len(operations), MAX_OPERATIONS):
            await self._transport.commit([], operations[start : start + MAX_OPERATIONS])
        self._written = wanted

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Follow what other agents say until the end of the block; without an answer of the store, nothing is known."""
        self._users += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_FIRST_LIST_S):
                    await self._running.wait()
                    await self._watch().wait_synced()
            yield
        finally:
            self._users -= 1
            if self._users == 0 and self._watching is not None:
                self._watching.cancel()
                self._watching = self._informer = None

    def _watch(self) -> Informer[ShareEntry]:
        if self._informer is None:
            assert self._group is not None
            self._informer = Informer(self._transport, keys.SHARE_PREFIX, _decode, self._clock)
            self._watching = self._group.create_task(self._informer.run())
        return self._informer

    def _entries(self) -> Mapping[str, ShareEntry]:
        return {} if self._informer is None else self._informer.items

    def offers(self) -> dict[str, dict[str, ModelOffer]]:
        """Return what other nodes offer: by node, then by the model's folder."""
        found: dict[str, dict[str, ModelOffer]] = {}
        for key, entry in self._entries().items():
            node, what, name = keys.share_parts(key)
            if what == "have" and node != self.node and isinstance(entry.document, ModelOffer):
                found.setdefault(node, {})[name] = entry.document
        return found

    def urls(self) -> dict[str, str]:
        """Return the address of each other node that offers a model."""
        found: dict[str, str] = {}
        for key, entry in self._entries().items():
            node = keys.share_parts(key)[0]
            if node != self.node and isinstance(entry.document, ModelOffer):
                found[node] = entry.document.url
        return found

    def queue(self, digest: str) -> list[str]:
        """Return the nodes that want a file, the one that may ask the hub first; this one only once the store has it."""
        found = [
            (entry.created, node)
            for key, entry in self._entries().items()
            for node, what, name in (keys.share_parts(key),)
            if what == "fetch" and name == digest
        ]
        return [node for _, node in sorted(found)]
