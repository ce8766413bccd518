"""Blocks of the prefix cache in a folder of files: checksums, LRU by bytes, and a thread that writes behind. No mlx.

A file never changes, and its name is the hash of everything that its values depend on, so engines of one machine can
share a folder. Any file may vanish at any time. A file is used at its modification time.
"""

import hashlib
import json
import logging
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from engine.cache.interface import DiskCacheStats
from machinery import files

log = logging.getLogger(__name__)

Buffer: TypeAlias = bytes | memoryview

_MAGIC = b"MLXKV001"
_SUFFIX = ".kv"
_CRC_BYTES = 4
_LENGTH_BYTES = 4
_MAX_HEADER_BYTES = 1 << 20
# Copies that wait for the disk may hold this much memory beside the prefix cache; 1/4 of the limit if that is less.
_MAX_PENDING_BYTES = 256 << 20
# Marks of use are of little worth where the disk is that slow.
_MAX_WAITING = 1024
# Other engines add files that this one does not count, so the folder is read anew after 1/16 of the limit.
_RECOUNTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FileContent:
    """The content of one file."""

    header: dict[str, Any]
    values: memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingBlock:
    key: str
    header: dict[str, Any]
    values: Sequence[Buffer]
    nbytes: int


def chain_keys(model: str, salt: str, tokens: bytes, block_bytes: int) -> Iterator[str]:
    """Yield the name of each full block of these tokens: a hash of the model, the salt and all tokens up to its end."""
    parent = hashlib.blake2b(repr((model, salt)).encode(), digest_size=32).digest()
    for start in range(0, len(tokens) - block_bytes + 1, block_bytes):
        block = tokens[start : start + block_bytes]
        parent = hashlib.blake2b(parent + block, digest_size=32).digest()
        yield parent.hex()


class BlockFiles:
    """The files of one folder, within `limit_bytes`; `read` and `offer` belong to one thread."""

    def __init__(self, folder: Path, *, limit_bytes: int) -> None:
        """Open the folder for this user only, and start the thread that writes.

        Raises:
            OSError: the folder cannot be created or read.
            PermissionError: the folder belongs to another user, or is open to others.

        """
        files.make_private_folder(folder)
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._max_pending = min(_MAX_PENDING_BYTES, limit_bytes // 4)
        self.stats = DiskCacheStats()
        self._known: set[str] = set()  # on disk, or on its way there
        self._pinned: frozenset[str] = frozenset()
        self._changed = threading.Condition()
        self._pending: deque[_PendingBlock | tuple[str, ...]] = deque()
        self._pending_bytes = 0
        self._is_busy = self._is_closed = self._has_failed = False
        self._uncounted = 0
        self._recount()
        self._thread = threading.Thread(target=self._write_all, name="prefix-disk", daemon=True)
        self._thread.start()

    def is_known(self, key: str) -> bool:
        """Return whether a block is on disk, or on its way there, as far as this process knows."""
        return key in self._known

    def has_file(self, key: str) -> bool:
        """Return whether a block is on disk, or on its way there; a file of another process is known once it was counted or read."""
        return key in self._known or self._path(key).exists()

    def read(self, key: str) -> FileContent | None:
        """Return the verified content of a block's file; None if there is none. A damaged file is deleted."""
        path = self._path(key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            self._known.discard(key)
            return None
        except OSError as error:
            log.warning("block not read", extra={"path": str(path), "why": error.strerror})
            return None
        file_content = _parse(content, key)
        if file_content is None:
            self.discard(key)
        else:
            self._known.add(key)
        return file_content

    def discard(self, key: str) -> None:
        """Delete a file whose content is wrong."""
        self.stats.damaged += 1
        self._known.discard(key)
        log.warning("damaged block deleted", extra={"path": str(self._path(key))})
        _unlink(self._path(key))

    def offer(
        self, key: str, header: dict[str, Any], nbytes: int, copy: Callable[[], Sequence[Buffer]]
    ) -> bool:
        """Queue a block to be written, or drop it if too many wait; `copy` returns values that never change."""
        if self._pending_bytes + nbytes > self._max_pending:
            self.stats.dropped += 1
            return False
        block = _PendingBlock(key=key, header=header, values=copy(), nbytes=nbytes)
        self._known.add(key)
        with self._changed:
            self._pending_bytes += nbytes
            self._pending.append(block)
            self._changed.notify_all()
        return True

    def pin(self, keys: Sequence[str]) -> None:
        """Delete these blocks after all others."""
        self._pinned |= frozenset(keys)

    def touch(self, keys: Sequence[str]) -> None:
        """Mark blocks as used soon, unless much waits already; the last one counts as the oldest, since it is of no use without the others."""
        with self._changed:
            if len(self._pending) < _MAX_WAITING:
                self._pending.append(tuple(reversed(keys)))
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing waits to be written; return False if this takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._pending or self._is_busy), timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what waits, and end the thread; leave the rest out if this takes longer."""
        self.flush(timeout_s)
        with self._changed:
            self._is_closed = True
            self._pending.clear()
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}{_SUFFIX}"

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._pending) or self._is_closed)
                if self._is_closed:
                    return
                item = self._pending.popleft()
                self._is_busy = True
            if isinstance(item, _PendingBlock):
                self._write(item)
            else:
                for key in item:
                    _touch(self._path(key))
            with self._changed:
                if isinstance(item, _PendingBlock):
                    self._pending_bytes -= item.nbytes
                self._is_busy = False
                self._changed.notify_all()
            del item  # its arrays would stay in memory until the next one comes

    def _write(self, block: _PendingBlock) -> None:
        try:
            size = self._write_file(block)
            self.stats.written += 1
            self.stats.nbytes += size
            log.debug("block written to disk", extra={"bytes": size})
            self._uncounted += size
            self._has_failed = False
            if (
                self.stats.nbytes > self._limit_bytes
                or self._uncounted > self._limit_bytes // _RECOUNTS
            ):
                self._recount()
        except OSError as error:
            self.stats.dropped += 1
            self._known.discard(block.key)
            if not self._has_failed:
                extra = {"folder": str(self._folder), "why": error.strerror}
                log.warning("prefix cache not written to disk", extra=extra)
            self._has_failed = True

    def _write_file(self, block: _PendingBlock) -> int:
        header = json.dumps({**block.header, "key": block.key}).encode()
        parts = [_MAGIC, len(header).to_bytes(_LENGTH_BYTES, "little"), header, *block.values]
        crc = 0
        with files.open_replacement(self._path(block.key)) as file:
            for part in parts:
                crc = zlib.crc32(part, crc)
                file.write(part)
            file.write(crc.to_bytes(_CRC_BYTES, "little"))
            return file.tell()

    def _recount(self) -> None:
        """Count the folder's files, and delete the least recently used ones beyond the limit."""
        found = []
        for entry in os.scandir(self._folder):
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if entry.name.endswith(_SUFFIX) or f"{_SUFFIX}." in entry.name:
                is_pinned = entry.name.removesuffix(_SUFFIX) in self._pinned
                found.append((is_pinned, status.st_mtime_ns, status.st_size, entry.name))
        found.sort(reverse=True)
        total, evicted = 0, self.stats.evicted
        known = set()
        for _, _, size, name in found:
            if total + size > self._limit_bytes:
                self.stats.evicted += 1
                self._known.discard(name.removesuffix(_SUFFIX))
                _unlink(self._folder / name)
            else:
                total += size
                if name.endswith(_SUFFIX):
                    known.add(name.removesuffix(_SUFFIX))
        if self.stats.evicted > evicted:
            fields = {"bytes": total, "limit_bytes": self._limit_bytes, "blocks": len(known)}
            log.debug("blocks on disk counted, and the oldest deleted", extra=fields)
        self._known |= known
        self.stats.nbytes = total
        self._uncounted = 0


def _parse(content: bytes, key: str) -> FileContent | None:
    start = len(_MAGIC) + _LENGTH_BYTES
    if len(content) < start + _CRC_BYTES or not content.startswith(_MAGIC):
        return None
    view = memoryview(content)
    if zlib.crc32(view[:-_CRC_BYTES]) != int.from_bytes(view[-_CRC_BYTES:], "little"):
        return None
    length = int.from_bytes(view[len(_MAGIC) : start], "little")
    if length > min(_MAX_HEADER_BYTES, len(content) - start - _CRC_BYTES):
        return None
    try:
        header = json.loads(content[start : start + length])
    except ValueError:
        return None
    if not isinstance(header, dict) or header.get("key") != key:
        return None
    return FileContent(header=header, values=view[start + length : -_CRC_BYTES])


def _touch(path: Path) -> None:
    try:
        now_ns = time.time_ns()  # the kernel's own stamps are equal for several milliseconds
        os.utime(path, ns=(now_ns, now_ns))
    except OSError as error:
        log.debug("block not marked as used", extra={"path": str(path), "why": error.strerror})


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("block not deleted", extra={"path": str(path), "why": error.strerror})
