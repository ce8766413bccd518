"""Reading of a content by its digest, for another Mac: a whole file, or what is there of one that still comes.

Every function blocks on the disk.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from models.hub.digests import BlobDigest
from models.model_store.partial_file import recorded_bytes
from models.model_store.store import ModelStore

_HEX_LENGTHS: Final = {64: "sha256", 40: "git-sha1"}


@dataclass(frozen=True, slots=True)
class OpenBlob:
    """An open file. It can be read to its end, even if it is removed meanwhile."""

    descriptor: int
    available: int
    """Bytes from the start that may be read."""
    is_whole: bool
    received: int
    """Bytes in the file; of one that another process writes, the last may not be read yet."""

    def read(self, start: int, count: int) -> bytes:
        """Return at most `count` bytes; fewer only if the file became shorter.

        Raises:
            OSError: the disk failed.

        """
        return os.pread(self.descriptor, count, start)

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)


def parse_hex(text: str) -> BlobDigest | None:
    """Return the digest that the digits are, by their number; None if they are none."""
    algorithm = _HEX_LENGTHS.get(len(text))
    with suppress(ValueError):
        if algorithm == "sha256":
            return BlobDigest("sha256", text)
        if algorithm == "git-sha1":
            return BlobDigest("git-sha1", text)
    return None


def open_blob(store: ModelStore, digest: BlobDigest) -> OpenBlob | None:
    """Open a content; None if nothing of it is here.

    Raises:
        OSError: the disk failed.

    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    # The whole file twice: the partial one may become it between the two attempts.
    for is_whole in (True, False, True):
        try:
            path = store.blob_path(store.sha256_of(digest)) if is_whole else store.part_path(digest)
            recorded = 0 if is_whole else _readable_bytes(store, digest)
            descriptor = os.open(path, flags)
        except FileNotFoundError:
            continue
        size = os.fstat(descriptor).st_size
        return OpenBlob(descriptor, size if is_whole else min(recorded, size), is_whole, size)
    return None


def _readable_bytes(store: ModelStore, digest: BlobDigest) -> int:
    """Return how many bytes of a partial file were received by this process, or recorded by any.

    A reader need not wait for a flush: after a crash it still has what it got. The file may hold more, from before a
    crash.
    """
    growing = store.growing.get(digest)
    return max(0 if growing is None else growing.offset, recorded_bytes(store.part_path(digest)))
