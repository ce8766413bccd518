"""Backup and restore of a store: every key below the fleet's prefix at one revision, to an archive and back.

etcd takes 128 operations at a time, so a restore can be interrupted. From its first write to its last it keeps a
marker in the store, and the election's key without a lease, so that no reconciler leads over an incomplete fleet.
Restoring the same file again completes an interrupted restore.
"""

import random
import secrets
from collections.abc import Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime
from typing import BinaryIO

from pydantic import BaseModel, ValidationError

from machinery.backoff import Backoff
from machinery.clock import Clock
from store import keys
from store.archive import ArchiveEntry, ArchiveHeader, ArchiveReader, ArchiveSummary, ArchiveWriter
from store.errors import CompactedError, ConflictError, StoreError, UnavailableError
from store.port import (
    MAX_OPERATIONS,
    Delete,
    Guard,
    KeyValue,
    ModRevisionGuard,
    Operation,
    Put,
    Transport,
)

# A history that is compacted during a list four times in a row means a store in trouble.
_LIST_ATTEMPTS = 4
PREFIX = f"{keys.ROOT}/"


class HalfRestoredError(StoreError):
    """A restore into this store was interrupted: complete it, then try again."""


def is_backed_up(item: KeyValue) -> bool:
    """Return whether a backup includes the key; keys under a lease describe the present moment and are left out."""
    return not (item.lease or _is_transient(item.key))


def _is_transient(key: str) -> bool:
    return key == keys.RESTORING or key.startswith(keys.TRANSIENT_PREFIXES)


async def save(
    transport: Transport,
    file: BinaryIO,
    *,
    now: datetime,
    fleet_version: str,
    authority: str | None = None,
) -> ArchiveSummary:
    """Write an archive of the store to the file, from its beginning. `authority`: its encrypted keys.

    Raises:
        HalfRestoredError: a restore into the store was interrupted.
        StoreError: the store could not be read.
        OSError: the file cannot be written.

    """
    if await transport.get(keys.RESTORING) is not None:
        raise HalfRestoredError(
            "a restore into this store was interrupted; run `fleetctl restore` again"
        )
    header = ArchiveHeader(
        created_at=now,
        fleet_version=fleet_version,
        etcd_version=(await transport.status()).version,
        store="",
        revision=0,
        prefix=PREFIX,
        authority=authority,
    )
    for attempt in range(1, _LIST_ATTEMPTS + 1):
        file.seek(0)
        file.truncate()
        try:
            return await _save_once(transport, file, header)
        except CompactedError:
            if attempt == _LIST_ATTEMPTS:
                raise
    raise AssertionError("unreachable")


async def _save_once(transport: Transport, file: BinaryIO, header: ArchiveHeader) -> ArchiveSummary:
    writer: ArchiveWriter | None = None
    async with aclosing(transport.pages(PREFIX)) as pages:
        async for page in pages:
            if writer is None:
                read = {"store": page.store, "revision": page.revision}
                writer = ArchiveWriter(file, header.model_copy(update=read))
            for item in filter(is_backed_up, page.items):
                writer.add(item.key, item.value)
    assert writer is not None, "a listing has at least one page"
    return writer.finish()


# etcd takes 1.5 MiB a request; a larger object is written alone.
_BATCH_BYTES = 2**20
ATTEMPTS = 12
# Half a minute in all: longer than an election of etcd, or a restart by its supervisor.
_BACKOFF = Backoff(first_s=0.1, limit_s=5.0)
_FENCE = b"fleetctl restore"


class RestoreRefusedError(StoreError):
    """Nothing was written; the message says why, and what to do."""


class _Marker(BaseModel):
    sha256: str
    nonce: str
    keeps_trust: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoreContents:
    """The relevant keys of a store before a restore."""

    kept: frozenset[str]
    leased: frozenset[str]
    marker: KeyValue | None
    election: KeyValue | None
    has_trust: bool = False

    def keeps_trust(self, sha256: str) -> bool:
        """Return whether `trust/` stays as it is; a restore that goes on does what it began."""
        if self.marker is not None and _parse_marker(self.marker).sha256 == sha256:
            return _parse_marker(self.marker).keeps_trust
        return self.has_trust


async def restore(
    transport: Transport,
    archive: ArchiveReader,
    clock: Clock,
    *,
    replace: bool = False,
    attempts: int = ATTEMPTS,
) -> bool:
    """Write the archive to the store and compare the result; `replace` allows existing keys.

    A store that has the trust of a fleet keeps it whole: an older one would make revoked certificates valid again.
    Return whether that of the archive was written.

    Each write is tried `attempts` times while the store does not answer.

    Raises:
        ArchiveError: the archive is damaged; nothing was written, unless the file changed meanwhile.
        RestoreRefusedError: the store is in use, or not empty; nothing was written.
        ConflictError: another writer changed the store meanwhile; the restore is incomplete.
        UnavailableError: no answer in all attempts; the restore is incomplete.

    """
    sha256 = archive.check().sha256
    if archive.header.prefix != PREFIX:
        raise RestoreRefusedError(
            f"the backup's keys begin with {archive.header.prefix}, and this version's with {PREFIX}"
        )
    # Without their lease such keys would stay: a Mac that is alive for ever, a join token without an end.
    if wrong := next(
        (
            archive_entry.key
            for archive_entry in archive.entries()
            if _is_transient(archive_entry.key)
        ),
        None,
    ):
        raise RestoreRefusedError(
            f"the backup has the key {wrong}, which `fleetctl backup` never writes: it is forged. Nothing was changed"
        )
    contents = await _read_contents(transport)
    _refuse(contents, sha256, replace=replace)
    left_out = (keys.TRUST_PREFIX,) if contents.keeps_trust(sha256) else ()
    work = _Restore(transport, clock, sha256, attempts, keeps_trust=bool(left_out))
    await work.begin(contents)

    def entries() -> Iterator[ArchiveEntry]:
        return (entry for entry in archive.entries() if not entry.key.startswith(left_out))

    if contents.kept:
        wanted = {entry.key for entry in entries()}
        surplus = (key for key in contents.kept - wanted if not key.startswith(left_out))
        await work.write(Delete(key=key) for key in sorted(surplus))
    await work.write(Put(key=entry.key, value=entry.value) for entry in entries())
    await _compare(transport, entries(), left_out)
    await work.end()
    return not left_out and any(entry.key == keys.FLEET_TRUST for entry in archive.entries())


async def _read_contents(transport: Transport) -> _StoreContents:
    kept: set[str] = set()
    leased: set[str] = set()
    single: dict[str, KeyValue] = {}
    async with aclosing(transport.pages(PREFIX)) as pages:
        async for page in pages:
            kept.update(item.key for item in page.items if is_backed_up(item))
            leased.update(item.key for item in page.items if item.lease)
            single |= {
                item.key: item
                for item in page.items
                if item.key in (keys.RESTORING, keys.ELECTION_RECONCILER, keys.FLEET_TRUST)
            }
    return _StoreContents(
        kept=frozenset(kept),
        leased=frozenset(leased),
        marker=single.get(keys.RESTORING),
        election=single.get(keys.ELECTION_RECONCILER),
        has_trust=keys.FLEET_TRUST in single,
    )


def _refuse(found: _StoreContents, sha256: str, *, replace: bool) -> None:
    """Refuse to mix two fleets, or to replace the store of a running fleet."""
    alive = sorted(
        key
        for key in found.leased
        if key.startswith((keys.NODE_LEASE_PREFIX, keys.ELECTION_PREFIX))
    )
    if alive:
        owners = ", ".join(key.rpartition("/")[2] for key in alive[:5])
        raise RestoreRefusedError(
            f"a fleet runs on this store ({owners}). Stop its reconcilers and agents, wait five seconds "
            "for their leases to end, and restore again; engines may keep serving"
        )
    if replace:
        return
    if found.marker is not None:
        if _parse_marker(found.marker).sha256 != sha256:
            raise RestoreRefusedError(
                "a restore of another file into this store was interrupted. Restore that file to "
                "complete it, or use --force to replace all keys of the fleet"
            )
    elif found.kept:
        raise RestoreRefusedError(
            f"the store is not empty: it has {len(found.kept)} keys of a fleet. Restore into an empty "
            "store, or use --force to replace all keys of the fleet"
        )


def _parse_marker(marker: KeyValue) -> _Marker:
    try:
        return _Marker.model_validate_json(marker.value)
    except ValidationError:
        return _Marker(sha256="", nonce="")


class _Restore:
    """One restore in progress; its marker guards every write."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        sha256: str,
        attempts: int,
        *,
        keeps_trust: bool,
    ) -> None:
        self._attempts = attempts
        self._transport = transport
        self._clock = clock
        marker = _Marker(sha256=sha256, nonce=secrets.token_hex(8), keeps_trust=keeps_trust)
        self._marker = Put(key=keys.RESTORING, value=marker.model_dump_json().encode())
        self._guard: Guard = ModRevisionGuard(key=keys.RESTORING, mod_revision=0)

    async def begin(self, found: _StoreContents) -> None:
        """Write the marker, unless another writer came since the store was read."""
        guards = [
            ModRevisionGuard(key=keys.RESTORING, mod_revision=_version(found.marker)),
            ModRevisionGuard(key=keys.ELECTION_RECONCILER, mod_revision=_version(found.election)),
        ]
        puts = [self._marker, Put(key=keys.ELECTION_RECONCILER, value=_FENCE)]
        for attempt in range(1, self._attempts + 1):
            failure: StoreError
            try:
                revision = await self._transport.commit(guards, puts)
            except (ConflictError, UnavailableError) as error:
                failure = error
            else:
                self._guard = ModRevisionGuard(key=keys.RESTORING, mod_revision=revision)
                return
            # The write may have succeeded although its answer was lost.
            there = await self._marker_there()
            if there is not None and there.value == self._marker.value:
                self._guard = ModRevisionGuard(key=keys.RESTORING, mod_revision=there.mod_revision)
                return
            if isinstance(failure, ConflictError):
                raise RestoreRefusedError(
                    "another writer started to use the store: another restore, or a reconciler. "
                    "Stop it, and restore again"
                ) from failure
            await self._wait(attempt, failure)

    async def write(self, operations: Iterable[Operation]) -> None:
        """Apply all operations, in the largest batches that etcd takes."""
        for batch in _batches(operations):
            for attempt in range(1, self._attempts + 1):
                try:
                    await self._transport.commit([self._guard], batch)
                except UnavailableError as error:
                    # Writing the same values twice is harmless.
                    await self._wait(attempt, error)
                except ConflictError as error:
                    raise ConflictError("another restore into this store took over") from error
                else:
                    break

    async def end(self) -> None:
        """Remove the marker; the restore is complete."""
        last = [Delete(key=keys.RESTORING), Delete(key=keys.ELECTION_RECONCILER)]
        for attempt in range(1, self._attempts + 1):
            try:
                await self._transport.commit([self._guard], last)
            except (ConflictError, UnavailableError) as error:
                there = await self._marker_there()
                if there is None:
                    return
                if isinstance(error, ConflictError):
                    raise ConflictError("another restore into this store took over") from error
                await self._wait(attempt, error)
            else:
                return

    async def _marker_there(self) -> KeyValue | None:
        for attempt in range(1, self._attempts + 1):
            try:
                return await self._transport.get(keys.RESTORING)
            except UnavailableError as error:
                await self._wait(attempt, error)
        raise AssertionError("unreachable")

    async def _wait(self, attempt: int, error: StoreError) -> None:
        if attempt == self._attempts:
            raise error
        await self._clock.sleep(_BACKOFF.delay_s(attempt, jitter=random.random()))


def _version(item: KeyValue | None) -> int:
    return item.mod_revision if item is not None else 0


def _batches(operations: Iterable[Operation]) -> Iterator[list[Operation]]:
    batch: list[Operation] = []
    size = 0
    for operation in operations:
        weight = len(operation.key) + (len(operation.value) if isinstance(operation, Put) else 0)
        if batch and (len(batch) == MAX_OPERATIONS or size + weight > _BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(operation)
        size += weight
    if batch:
        yield batch


async def _compare(
    transport: Transport, entries: Iterator[ArchiveEntry], left_out: tuple[str, ...]
) -> None:
    """Read back every key and compare it with the archive."""
    async with aclosing(transport.pages(PREFIX)) as pages:
        async for page in pages:
            for item in filter(is_backed_up, page.items):
                if item.key.startswith(left_out):
                    continue
                if next(entries, None) != ArchiveEntry(key=item.key, value=item.value):
                    raise ConflictError(f"another writer changed {item.key} during the restore")
    missing = next(entries, None)
    if missing is not None:
        raise ConflictError(f"another writer removed {missing.key} during the restore")
