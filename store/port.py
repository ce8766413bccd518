"""The port to the key-value store: what an adapter must do, in our own words.

Adapters: `store.memory` (tests) and `store.etcd.grpc` and `store.etcd.http`. All pass `tests/store/test_contract.py`.
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
    """One event: the key has this value now; None means that it was deleted."""

    key: str
    mod_revision: int
    now: KeyValue | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchBatch:
    """Changes in order; without changes it says that nothing happened up to `revision`."""

    revision: int
    changes: tuple[KeyChange, ...]
    store: str = ""
    """Which store this is; see `Listing`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModRevisionGuard:
    """Guard: the key's last change is this revision; 0 means that the key is not there."""

    key: str
    mod_revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateRevisionGuard:
    """Guard: the key was created at this revision (the fence of an election)."""

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
    """Remove a key; removing what is not there is no error."""

    key: str


Operation: TypeAlias = Put | Delete

# etcd's default --max-txn-ops; guards count like operations.
MAX_OPERATIONS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """What the server says of itself."""

    version: str
    revision: int


class Transport(Protocol):
    """A key-value store with revisions, guarded transactions, watches and leases.

    Every call ends within its time limit, and raises the errors of `store.errors`.
    """

    async def get(self, key: str) -> KeyValue | None:
        """Return the key as it is now (linearizable); None if it is not there."""
        ...

    async def list(self, prefix: str) -> Listing:
        """Return every key that begins with `prefix`, all as of one revision.

        Raises:
            CompactedError: the store dropped that revision while it was read, again and again.

        """
        ...

    def pages(self, prefix: str) -> AsyncGenerator[Listing]:
        """Yield the same in pages of a few megabytes, all as of the first page's revision.

        There is one page at least, be it empty. To be closed (`aclosing`) when left early.

        Raises:
            CompactedError: the store dropped that revision between two pages: begin again;
                ReplacedError: it is another store by now.
            UnavailableError: no answer.

        """
        ...

    async def commit(self, guards: Sequence[Guard], operations: Sequence[Operation]) -> int:
        """Do all operations in one revision if all guards hold; return that revision.

        Raises:
            ConflictError: a guard does not hold; nothing was written.
            UnavailableError: no answer; if `ambiguous`, it may have been written.

        """
        ...

    def watch(self, prefix: str, *, after_revision: int) -> AsyncGenerator[WatchBatch]:
        """Yield what changes below `prefix` after that revision, in order, until it breaks.

        The first batch has no changes: it says that the watch stands. Does not reconnect.

        Raises:
            CompactedError: the history is gone; ReplacedError: the store has not come so far,
                so it is not the one that was listed.
            UnavailableError: the stream broke; watch again after the last revision seen.

        """
        ...

    async def grant(self, ttl_s: int) -> int:
        """Return a new lease that lives `ttl_s` seconds unless it is kept alive."""
        ...

    async def keep_alive(self, lease: int) -> int:
        """Renew; return the seconds it lives from the sending of this call; 0 if it is gone."""
        ...

    async def revoke(self, lease: int) -> None:
        """End a lease and delete its keys; a lease that is gone is no error."""
        ...

    async def status(self) -> ServerStatus:
        """Return the server's version and revision."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...
