"""A file that is not whole yet: its bytes, and a journal of the pieces that are safely on the disk.

Every method blocks on the disk; call them in a thread, one at a time.
"""

import fcntl
import os
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from models.hub.digests import BlobDigest, ContentHash
from models.model_store.piece_list import PIECE_BYTES, PieceHasher

_READ_BYTES: Final = 1 << 20
_MAX_JOURNAL_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class _Piece:
    end: int
    checksum: int


class PartialFile:
    """One content on its way. Its lock keeps other fetches of the same content away, in all processes.

    What the journal names was flushed before. After a crash the bytes behind it are cut off: a kill costs one piece.
    """

    def __init__(
        self, descriptor: int, path: Path, digest: BlobDigest, *, size: int, piece_bytes: int
    ) -> None:
        """Take over a locked descriptor; `open_partial` is the way to get one."""
        self._descriptor = descriptor
        self._path = path
        self._journal = path.with_suffix(".journal")
        self._digest = digest
        self._size = size
        self._piece_bytes = piece_bytes
        self._is_finished = False
        self._hash = ContentHash(size=size, algorithm=digest.algorithm)
        # A file of one piece is its own piece.
        self._pieces = PieceHasher() if size > PIECE_BYTES else None
        self.offset = 0
        """Bytes that are in the file and in the hash."""
        self._journaled = 0
        self._checksum = 0
        self._pending = _read_journal(self._journal, size)

    def verify_next(self) -> bool:
        """Read one more piece of an earlier fetch; return False when all that is sound has been read.

        The first piece whose bytes differ from the journal, and all after it, are dropped.
        """
        if not self._pending:
            self._truncate()
            return False
        piece = self._pending.pop(0)
        checked, trial, at = 0, self._hash.copy(), self.offset
        pieces = None if self._pieces is None else self._pieces.copy()
        while at < piece.end:
            read = os.pread(self._descriptor, min(_READ_BYTES, piece.end - at), at)
            if not read:
                break
            checked = zlib.crc32(read, checked)
            trial.update(read)
            if pieces is not None:
                pieces.update(read)
            at += len(read)
        if at < piece.end or checked != piece.checksum:
            self._pending.clear()
            return True
        self._hash, self._pieces = trial, pieces
        self.offset = self._journaled = piece.end
        return True

    def _truncate(self) -> None:
        os.ftruncate(self._descriptor, self.offset)
        if self._journal.exists():
            lines = [
                line for line in self._journal.read_bytes().splitlines(keepends=True)
                if line.endswith(b"\n") and (piece := _parse_piece(line)) and piece.end <= self.offset
            ]  # fmt: skip
            self._journal.write_bytes(b"".join(lines))

    @property
    def bytes_to_checkpoint(self) -> int:
        """Return how many bytes complete the piece."""
        return self._piece_bytes - (self.offset - self._journaled)

    def write(self, content: bytes | bytearray | memoryview) -> None:
        """Append bytes; each full piece is flushed and recorded.

        Raises:
            OSError: the disk is full or failed.

        """
        view = memoryview(content)
        while view:
            room = self.bytes_to_checkpoint
            part, view = view[:room], view[room:]
            while part:
                written = os.pwrite(self._descriptor, part, self.offset)
                self._hash.update(part[:written])
                if self._pieces is not None:
                    self._pieces.update(part[:written])
                self._checksum = zlib.crc32(part[:written], self._checksum)
                self.offset += written
                part = part[written:]
            if self.bytes_to_checkpoint <= 0:
                self.checkpoint()

    def checkpoint(self) -> None:
        """Flush what was written, and record it: a later fetch goes on from here."""
        if self.offset == self._journaled:
            return
        os.fsync(self._descriptor)
        with self._journal.open("ab") as journal:
            journal.write(b"%d %d\n" % (self.offset, self._checksum))
            journal.flush()
            os.fsync(journal.fileno())
        self._journaled, self._checksum = self.offset, 0

    def seal(self) -> ContentHash:
        """Flush the whole file; return its hash, for the caller to compare."""
        os.fsync(self._descriptor)
        return self._hash

    @property
    def piece_hashes(self) -> tuple[str, ...]:
        """Return the hashes of the pieces; () for a small file."""
        return () if self._pieces is None else self._pieces.hashes()

    def restart(self) -> None:
        """Forget all bytes, which are not what they should be, and begin again."""
        self._journal.unlink(missing_ok=True)
        os.ftruncate(self._descriptor, 0)
        self._pending.clear()
        self._hash = ContentHash(size=self._size, algorithm=self._digest.algorithm)
        self._pieces = None if self._pieces is None else PieceHasher()
        self.offset = self._journaled = self._checksum = 0

    def discard(self) -> None:
        """Remove the file: its content is in the store already."""
        self._path.unlink(missing_ok=True)
        self.finish()

    def finish(self) -> None:
        """Remove the journal, after the file was moved into the store."""
        self._journal.unlink(missing_ok=True)
        self._is_finished = True

    def close(self) -> None:
        """Record what was written, so that a fetch that is cancelled loses nothing, and release the lock."""
        if self._descriptor < 0:
            return
        if not self._is_finished:
            with suppress(OSError):  # such as a full disk: it costs a piece
                self.checkpoint()
        os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_partial(
    path: Path, digest: BlobDigest, *, size: int, piece_bytes: int
) -> PartialFile | None:
    """Open the partial file and lock it; None while another fetch has it.

    Raises:
        OSError: the disk is full or failed.

    """
    descriptor = open_locked(path)
    if descriptor is None:
        return None
    return PartialFile(descriptor, path, digest, size=size, piece_bytes=piece_bytes)


def open_locked(path: Path) -> int | None:
    """Open or create a file and lock it; None while another process, or another place in this one, has it.

    Raises:
        OSError: the disk is full or failed.

    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The holder before may have renamed or removed the file: then this is the lock of nothing.
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def recorded_bytes(path: Path) -> int:
    """Return how many bytes of a partial file its journal names: those were flushed, and stay."""
    pieces = _read_journal(path.with_suffix(".journal"), 1 << 62)
    return pieces[-1].end if pieces else 0


def _read_journal(path: Path, size: int) -> list[_Piece]:
    try:
        if path.stat().st_size > _MAX_JOURNAL_BYTES:
            return []
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    pieces: list[_Piece] = []
    for line in lines:
        piece = _parse_piece(line)
        last = pieces[-1].end if pieces else 0
        if piece is None or not last < piece.end <= size:
            break  # the crash came while this line was written
        pieces.append(piece)
    return pieces


def _parse_piece(line: bytes) -> _Piece | None:
    words = line.split()
    if not line.endswith(b"\n") or len(words) != 2 or not all(word.isdigit() for word in words):
        return None
    return _Piece(int(words[0]), int(words[1]))
