"""The port to the key-value store: the interface that every adapter implements.

Adapters: `store.memory` (tests), `store.etcd.grpc` and `store.etcd.http`. All pass `tests/store/test_port.py`.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from store.reads import KeyValue, Listing, StoreReader

__all__ = [
    "MAX_OPERATIONS",
    "CreateRevisionGuard",
    "Delete",
    "Guard",
    "KeyChange",
    "KeyValue",
    "Listing",
    "ModRevisionGuard",
    "Operation",
    "Put",
    "ServerStatus",
    "StoreReader",
    "Transport",
    "WatchBatch",
]


class KeyChange(NamedTuple):
    """One change of a key: its new value, or None if it was deleted."""

    key: str
    mod_revision: int
    now: KeyValue | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchBatch:
    """Changes in order; without changes it reports that nothing happened up to `revision`."""

    revision: int
    changes: tuple[KeyChange, ...]
    store: str = ""
    """The id of the store; see `Listing`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModRevisionGuard:
    """Holds if the key's last change is this revision; 0 means that the key does not exist."""

    key: str
    mod_revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateRevisionGuard:
    """Holds if the key was created at this revision (the fence of an election)."""

    key: str
    create_revision: int


Guard: TypeAlias = ModRevisionGuard | CreateRevisionGuard


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """Write a key, bound to a lease if one is given."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    """Remove a key; a key that does not exist is no error."""

    key: str


Operation: TypeAlias = Put | Delete

# etcd's default --max-txn-ops; guards count as operations do.
MAX_OPERATIONS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """The server's version and revision."""

    version: str
    revision: int


class Transport(Protocol):
    """A key-value store with revisions, guarded transactions, watches and leases.

    Every call ends within its time limit, and raises the errors of `store.errors`.
    """

    async def get(self, key: str) -> KeyValue | None:
        """Return the current value of the key (linearizable); None if it does not exist."""
        ...

    async def list(self, prefix: str) -> Listing:
        """Return every key that begins with `prefix`, all as of one revision.

        Raises:
            CompactedError: the revision was compacted during each of several attempts.

        """
        ...

    def pages(self, prefix: str) -> AsyncGenerator[Listing]:
        """Yield the same in pages of a few megabytes, all as of the first page's revision.

        There is at least one page, which may be empty. Close the generator (`aclosing`) when leaving early.

        Raises:
            CompactedError: the revision was compacted between two pages: start again;
                ReplacedError: the store was replaced.
            UnavailableError: no answer.

        """
        ...

    async def commit(self, guards: Sequence[Guard], operations: Sequence[Operation]) -> int:
        """Apply all operations in one revision if all guards hold; return that revision.

        Without operations it asks whether the guards hold; a member of etcd that lags behind may say so too late.

        Raises:
            ConflictError: a guard does not hold; nothing was written.
            UnavailableError: no answer; if `ambiguous`, it may have been written.

        """
        ...

    def watch(self, prefix: str, *, after_revision: int) -> AsyncGenerator[WatchBatch]:
        """Yield the changes below `prefix` after that revision, in order, until the watch breaks.

        The first batch has no changes: it confirms that the watch is established. Does not reconnect.

        Raises:
            CompactedError: the history is gone; ReplacedError: the store has not reached the revision,
                so it is not the one that was listed.
            UnavailableError: the stream broke; watch again after the last revision seen.

        """
        ...

    async def grant(self, ttl_s: int) -> int:
        """Return a new lease that lives `ttl_s` seconds unless it is kept alive."""
        ...

    async def keep_alive(self, lease: int) -> int:
        """Renew the lease; return its lifetime in seconds from the sending of this call, or 0 if it is gone."""
        ...

    async def revoke(self, lease: int) -> None:
        """End a lease and delete its keys; a lease that is gone is no error."""
        ...

    async def status(self) -> ServerStatus:
        """Return the server's version and revision."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...
