"""Hashes of the pieces of large files, by which a wrong piece is noticed when it comes, and not at the end of the file.

The Mac that verified a whole file keeps the hashes of its pieces; the list of a model has those of all its large files.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

PIECE_BYTES: Final = 32 << 20
# 22,000 pieces of the largest models take 1.5 MB.
MAX_LIST_BYTES: Final = 16 << 20
_MAX_PIECES: Final = 100_000


class PieceHasher:
    """Computes the SHA-256 of each piece of a file, while its bytes come in order."""

    def __init__(self) -> None:
        self._ended: list[str] = []
        self._current = hashlib.sha256()
        self._count = 0

    def copy(self) -> "PieceHasher":
        """Return the hasher of the same bytes, to which other ones can be added."""
        piece_hasher = PieceHasher()
        piece_hasher._ended, piece_hasher._count = list(self._ended), self._count
        piece_hasher._current = self._current.copy()
        return piece_hasher

    def update(self, content: bytes | bytearray | memoryview) -> None:
        """Add the next bytes of the file."""
        view = memoryview(content)
        while view:
            part, view = view[: PIECE_BYTES - self._count], view[PIECE_BYTES - self._count :]
            self._current.update(part)
            self._count += len(part)
            if self._count == PIECE_BYTES:
                self._ended.append(self._current.hexdigest())
                self._current, self._count = hashlib.sha256(), 0

    def hashes(self) -> tuple[str, ...]:
        """Return the hashes of all pieces; the last one may be short."""
        return (*self._ended, self._current.hexdigest()) if self._count else tuple(self._ended)


@dataclass(frozen=True, slots=True)
class PieceList:
    """The hashes of the pieces of a model's large files, by the SHA-256 of the file."""

    files: Mapping[str, tuple[str, ...]]

    def hash_at(self, sha256: str, start: int, size: int) -> str:
        """Return the hash of the piece that starts at a byte of a file; "" if it is unknown, or no piece starts there."""
        pieces = self.files.get(sha256, ())
        if start % PIECE_BYTES or len(pieces) != -(-size // PIECE_BYTES):
            return ""
        return pieces[start // PIECE_BYTES]

    def encode(self) -> bytes:
        """Return the list as JSON; the same list is always the same bytes."""
        tree = {"pieceBytes": PIECE_BYTES, "files": dict(sorted(self.files.items()))}
        return json.dumps(tree, separators=(",", ":")).encode()


_Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class _Document(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)
    piece_bytes: int = Field(alias="pieceBytes")
    files: dict[_Sha256, tuple[_Sha256, ...]]


def decode_list(content: bytes) -> PieceList:
    """Return the list in a document of another Mac.

    Raises:
        ValueError: it is none, or its pieces have another size.

    """
    try:
        document = _Document.model_validate_json(content)
    except ValidationError as error:
        raise ValueError(f"it is no list of pieces: {error.error_count()} errors") from error
    if document.piece_bytes != PIECE_BYTES:
        raise ValueError(f"its pieces have {document.piece_bytes} bytes; expected {PIECE_BYTES}")
    if sum(map(len, document.files.values())) > _MAX_PIECES:
        raise ValueError(f"it has more than {_MAX_PIECES} pieces")
    return PieceList(document.files)
