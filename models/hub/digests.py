"""Digests that name files: SHA-256 for large files, and Git's SHA-1 of a blob for small ones.

Must not be used on the event loop for more than a few MiB: hashing belongs into threads.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from typing_extensions import override

DigestAlgorithm: TypeAlias = Literal["sha256", "git-sha1"]

_HEX_LENGTHS: Final = {"sha256": 64, "git-sha1": 40}
_READ_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class BlobDigest:
    """The digest of a file's content, as a hub names it."""

    algorithm: DigestAlgorithm
    hex: str

    def __post_init__(self) -> None:
        """Refuse anything but lower-case hexadecimal digits: digests become file names.

        Raises:
            ValueError: it is no digest of this algorithm.

        """
        if not re.fullmatch(r"[0-9a-f]+", self.hex) or len(self.hex) != self.length:
            raise ValueError(
                f"{self.hex[:80]!r} is no {self.algorithm} digest: expected {self.length} hexadecimal digits"
            )

    @property
    def length(self) -> int:
        """Return the number of hexadecimal digits that the algorithm has."""
        return _HEX_LENGTHS[self.algorithm]

    @override
    def __str__(self) -> str:
        return f"{self.algorithm}:{self.hex}"


class ContentHash:
    """Computes a file's SHA-256 and, where the hub names the file by it, Git's SHA-1 in one pass."""

    def __init__(self, *, size: int, algorithm: DigestAlgorithm) -> None:
        """`size` is that of the whole file in bytes: Git hashes it before the content."""
        self._sha256 = hashlib.sha256()
        self._sha1 = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        self._algorithm = algorithm

    def copy(self) -> "ContentHash":
        """Return the hash of the same bytes, to which other ones can be added."""
        content_hash = ContentHash(size=0, algorithm=self._algorithm)
        content_hash._sha256, content_hash._sha1 = self._sha256.copy(), self._sha1.copy()
        return content_hash

    def update(self, content: bytes | memoryview) -> None:
        """Add the next bytes of the file."""
        self._sha256.update(content)
        if self._algorithm == "git-sha1":
            self._sha1.update(content)

    @property
    def sha256(self) -> BlobDigest:
        """Return the name that the file has in the store."""
        return BlobDigest("sha256", self._sha256.hexdigest())

    @property
    def named(self) -> BlobDigest:
        """Return the digest of the algorithm that the hub uses for the file."""
        if self._algorithm == "sha256":
            return self.sha256
        return BlobDigest("git-sha1", self._sha1.hexdigest())


def hash_file(path: Path, algorithm: DigestAlgorithm = "sha256") -> ContentHash:
    """Return the hash of a whole file. Blocks while it reads.

    Raises:
        OSError: the file cannot be read.

    """
    with path.open("rb") as file:
        content_hash = ContentHash(size=path.stat().st_size, algorithm=algorithm)
        while piece := file.read(_READ_BYTES):
            content_hash.update(piece)
    return content_hash
