"""Admission of a fetch before its first byte: the disk has room for it and for all fetches under way.

A fetch is recorded in a file that it keeps locked. Its contents are safe from collection, and what they still need
counts for the admission of others, in all processes of the machine.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from models.hub.digests import BlobDigest
from models.hub.errors import InsufficientDiskError
from models.hub.file_selection import DEFAULT_PATTERNS
from models.model_store.partial_file import open_locked
from models.model_store.store import ModelStore
from schemas.model_snapshot import ModelSnapshot

# LocalAI's rule: room for file system metadata, logs and swap, in proportion to what comes.
_MARGIN_PERCENT: Final = 5
_MARGIN_BYTES: Final = 1 << 30
_MAX_RECORD_BYTES: Final = 16 << 20


class _FetchRecord(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)
    sizes: dict[str, int]
    """Sizes by digest, `algorithm:hex`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchIntent:
    """The contents that one fetch wants, read from its record."""

    name: str
    sizes: Mapping[BlobDigest, int]
    is_running: bool
    """False for a fetch that was killed."""
    started_at: float
    """Seconds since 1970."""


def disk_shortfall(*, free_bytes: int, reserve_bytes: int, missing_bytes: int) -> int:
    """Return how many bytes the disk lacks for what is missing; 0 if it has room.

    The reserve stays free, and so does a margin of 5 % of what is missing, at least 1 GiB.
    """
    if missing_bytes == 0:
        return 0
    margin = max(missing_bytes * _MARGIN_PERCENT // 100, _MARGIN_BYTES)
    return max(0, missing_bytes + margin - (free_bytes - reserve_bytes))


class FetchReservation:
    """The room and the contents that one running fetch holds; it ends with the process at the latest."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """Take over a locked descriptor; `reserve` is the way to get one."""
        self._path = path
        self._descriptor = descriptor

    def release(self, *, keeps_record: bool = False) -> None:
        """End the reservation; a kept record lets a later fetch go on from partial files."""
        if self._descriptor < 0:
            return
        if not keeps_record:
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = -1

    def close(self) -> None:
        """End the reservation of a fetch that never began."""
        self.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release(keeps_record=kind is not None)


def reserve(
    store: ModelStore, name: str, sizes: Mapping[BlobDigest, int], *, collectable_bytes: int = 0
) -> FetchReservation | None:
    """Reserve room for the contents of a model's folder; None while another fetch of the same folder runs.

    Raises:
        InsufficientDiskError: the disk has no room; `collectable_bytes` is named as what could be freed.
        OSError: the disk failed.

    """
    with store.locked():
        path = store.fetches / f"{name}.json"
        descriptor = open_locked(path)
        if descriptor is None:
            return None
        try:
            _check_room(store, name, sizes, collectable_bytes)
            record = _FetchRecord(sizes={str(digest): size for digest, size in sizes.items()})
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, record.model_dump_json().encode(), 0)
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        return FetchReservation(path, descriptor)


def is_reserved(store: ModelStore, name: str) -> bool:
    """Return whether a fetch of the model's folder runs, in any process."""
    with store.locked():
        return any(intent.is_running for intent in read_intents(store) if intent.name == name)


def _check_room(
    store: ModelStore, name: str, sizes: Mapping[BlobDigest, int], collectable_bytes: int
) -> None:
    own = missing_bytes(store, sizes)
    if own == 0:
        return
    wanted = dict(sizes)
    for intent in read_intents(store):
        if intent.is_running and intent.name != name:
            wanted.update(intent.sizes)
    every = missing_bytes(store, wanted)
    free = shutil.disk_usage(store.root).free
    shortfall = disk_shortfall(
        free_bytes=free, reserve_bytes=store.reserve_bytes, missing_bytes=every
    )
    if shortfall == 0:
        return
    others = f", and other fetches still need {_size(every - own)}" if every > own else ""
    reserved = f" ({_size(store.reserve_bytes)} reserved)" if store.reserve_bytes else ""
    raise InsufficientDiskError(
        f"{name} needs {_size(own)} more{others}; the disk of {store.root} has {_size(free)} free{reserved}: "
        f"{_size(shortfall)} too little. "
        + (
            f"Unused models have {_size(collectable_bytes)}, which a collection would free"
            if collectable_bytes
            else "No unused model can be collected; remove or unpin one, or free space"
        ),
        missing_bytes=shortfall,
        collectable_bytes=collectable_bytes,
    )


def missing_bytes(store: ModelStore, sizes: Mapping[BlobDigest, int]) -> int:
    """Return how many bytes of the contents are not on the disk."""
    found = 0
    for digest, size in sizes.items():
        if store.has_blob(digest):
            continue
        try:
            part = store.part_path(digest).stat().st_size
        except OSError:
            part = 0
        found += max(0, size - part)
    return found


def snapshot_missing_bytes(store: ModelStore, snapshot: ModelSnapshot) -> int:
    """Return the bytes that a fetch of the snapshot would bring, in coarse steps: exact if nothing is here.

    Between, the number is rounded up to a power of two, so that a report changes a few times during a fetch.
    """
    pinned = snapshot.pinned
    whole = store.find(pinned.repo, pinned.revision)
    if whole is not None and set(pinned.files or DEFAULT_PATTERNS) <= set(whole.patterns):
        return 0
    sizes = {_parse_digest(file.digest): file.size_bytes for file in snapshot.large_files}
    small = max(0, snapshot.size_bytes - sum(sizes.values()))
    found = missing_bytes(store, sizes) + small
    if found >= snapshot.size_bytes:
        return snapshot.size_bytes
    return min(snapshot.size_bytes, 1 << max(0, found - 1).bit_length())


def read_intents(store: ModelStore) -> tuple[FetchIntent, ...]:
    """Return the fetches that run or were killed. Call it within `locked()`."""
    fetch_intents = []
    for path in sorted(store.fetches.glob("*.json")):
        try:
            if path.stat().st_size > _MAX_RECORD_BYTES:
                continue
            record = _FetchRecord.model_validate_json(path.read_bytes())
            sizes = {_parse_digest(text): size for text, size in record.sizes.items()}
            started = path.stat().st_mtime
        except (OSError, ValidationError, ValueError):
            continue  # cut short by a crash: it protects nothing
        descriptor = open_locked(path)
        if descriptor is not None:
            os.close(descriptor)
        fetch_intents.append(
            FetchIntent(
                name=path.stem, sizes=sizes, is_running=descriptor is None, started_at=started
            )
        )
    return tuple(fetch_intents)


def _parse_digest(text: str) -> BlobDigest:
    algorithm, _, digits = text.partition(":")
    if algorithm == "sha256":
        return BlobDigest("sha256", digits)
    if algorithm == "git-sha1":
        return BlobDigest("git-sha1", digits)
    raise ValueError(f"{algorithm[:20]!r} is no algorithm")


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.1f} MiB"
