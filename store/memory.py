"""The memory adapter: etcd's semantics in a dictionary, for tests and simulations. Persists nothing."""

import asyncio
from bisect import bisect_right
from collections.abc import AsyncGenerator, Sequence

from machinery.clock import Clock
from store import reads
from store.errors import (
    CompactedError,
    ConflictError,
    LeaseLostError,
    ReplacedError,
    TooLargeError,
)
from store.port import (
    MAX_OPERATIONS,
    CreateRevisionGuard,
    Delete,
    Guard,
    KeyChange,
    KeyValue,
    Listing,
    ModRevisionGuard,
    Operation,
    Put,
    ServerStatus,
    WatchBatch,
)

# etcd's default --max-request-bytes.
_MAX_BYTES = 1_572_864


class MemoryTransport:
    """`store.port.Transport` in memory; one instance is shared by all its users."""

    def __init__(
        self, clock: Clock, *, version: str = "memory", expires_by_itself: bool = True
    ) -> None:
        """Create an empty store.

        With `expires_by_itself`, each watch also checks for expired leases ten times a second. Without it, call
        `expire()`: waking a thousand watches so often is most of a simulation's work.
        """
        self._clock = clock
        self._look_every_s = 0.1 if expires_by_itself else None
        self._next_end = float("inf")
        self._waiting: dict[asyncio.Event, str] = {}
        self._version = version
        self._keys: dict[str, KeyValue] = {}
        self._history: list[KeyChange] = []
        self._revision = 1
        self._compacted = 0
        self._leases: dict[int, tuple[int, float]] = {}

    async def get(self, key: str) -> KeyValue | None:
        self.expire()
        return self._keys.get(key)

    async def list(self, prefix: str) -> Listing:
        return await reads.collect(lambda: self.pages(prefix))

    async def pages(self, prefix: str) -> AsyncGenerator[Listing]:
        self.expire()
        revision = self._revision
        found = [self._keys[key] for key in sorted(self._keys) if key.startswith(prefix)]
        for start in range(0, max(len(found), 1), reads.PAGE):
            if revision < self._compacted:
                raise CompactedError("the listed revision was compacted")
            items = tuple(found[start : start + reads.PAGE])
            yield Listing(revision=revision, items=items)

    async def commit(self, guards: Sequence[Guard], operations: Sequence[Operation]) -> int:
        self.expire()
        if max(len(guards), len(operations)) > MAX_OPERATIONS:
            raise TooLargeError(f"a transaction takes at most {MAX_OPERATIONS} operations")
        if sum(len(op.value) for op in operations if isinstance(op, Put)) > _MAX_BYTES:
            raise TooLargeError("request is too large")
        for op in operations:
            if isinstance(op, Put) and op.lease and op.lease not in self._leases:
                raise LeaseLostError("requested lease not found")
        if not all(self._holds(guard) for guard in guards):
            raise ConflictError("the data has changed since it was read")
        self._apply(operations)
        return self._revision

    def _holds(self, guard: Guard) -> bool:
        now = self._keys.get(guard.key)
        if isinstance(guard, CreateRevisionGuard):
            return (now.create_revision if now else 0) == guard.create_revision
        assert isinstance(guard, ModRevisionGuard)
        return (now.mod_revision if now else 0) == guard.mod_revision

    def _apply(self, operations: Sequence[Operation]) -> None:
        effective = [o for o in operations if isinstance(o, Put) or o.key in self._keys]
        if not effective:
            return
        self._revision += 1
        changes = [self._change(operation) for operation in effective]
        self._history.extend(changes)
        # Wake the watches of the changed keys.
        for moved, prefix in self._waiting.items():
            if any(change.key.startswith(prefix) for change in changes):
                moved.set()

    def _change(self, operation: Operation) -> KeyChange:
        if isinstance(operation, Delete):
            self._keys.pop(operation.key, None)
            return KeyChange(key=operation.key, mod_revision=self._revision, now=None)
        before = self._keys.get(operation.key)
        now = KeyValue(
            key=operation.key,
            value=operation.value,
            create_revision=before.create_revision if before else self._revision,
            mod_revision=self._revision,
            lease=operation.lease,
        )
        self._keys[operation.key] = now
        return KeyChange(key=now.key, mod_revision=self._revision, now=now)

    async def watch(self, prefix: str, *, after_revision: int) -> AsyncGenerator[WatchBatch]:
        yield WatchBatch(revision=after_revision, changes=())
        while True:
            self.expire()
            if after_revision > self._revision:
                raise ReplacedError("the store was replaced or rolled back")
            if after_revision < self._compacted:
                raise CompactedError("the history was compacted")
            upto = self._revision
            start = bisect_right(self._history, after_revision, key=lambda c: c.mod_revision)
            fresh = tuple(c for c in self._history[start:] if c.key.startswith(prefix))
            after_revision = upto
            if fresh:
                yield WatchBatch(revision=upto, changes=fresh)
                continue
            await self._wait(prefix)

    async def _wait(self, prefix: str) -> None:
        """Wait for a change, and check leases now and then as etcd does."""
        moved = asyncio.Event()
        self._waiting[moved] = prefix
        try:
            async with asyncio.timeout(self._look_every_s if self._leases else None):
                await moved.wait()
        except TimeoutError:
            return
        finally:
            del self._waiting[moved]

    def compact(self) -> None:
        """Drop the history, as etcd's compaction does."""
        self._compacted = self._revision
        self._history.clear()

    async def grant(self, ttl_s: int) -> int:
        self.expire()
        lease = max(self._leases, default=1000) + 1 + self._revision
        self._leases[lease] = (ttl_s, self._clock.monotonic() + ttl_s)
        self._next_end = min(self._next_end, self._leases[lease][1])
        if self._look_every_s is not None:
            for moved in self._waiting:
                moved.set()  # a watch without a limit has a lease to check from now on
        return lease

    async def keep_alive(self, lease: int) -> int:
        self.expire()
        if lease not in self._leases:
            return 0
        ttl_s, _ = self._leases[lease]
        self._leases[lease] = (ttl_s, self._clock.monotonic() + ttl_s)
        return ttl_s

    async def revoke(self, lease: int) -> None:
        self.expire()
        if self._leases.pop(lease, None) is not None:
            self._drop_keys_of(lease)

    async def status(self) -> ServerStatus:
        return ServerStatus(version=self._version, revision=self._revision)

    async def close(self) -> None:
        return

    def expire(self) -> None:
        """End expired leases and delete their keys."""
        now = self._clock.monotonic()
        if now < self._next_end:
            return
        for lease in [lease for lease, (_, due) in self._leases.items() if due <= now]:
            del self._leases[lease]
            self._drop_keys_of(lease)
        # Renewals only postpone deadlines, so there is nothing to check before this one.
        self._next_end = min((due for _, due in self._leases.values()), default=float("inf"))

    def _drop_keys_of(self, lease: int) -> None:
        bound = [kv.key for kv in self._keys.values() if kv.lease == lease]
        self._apply([Delete(key=key) for key in bound])
