"""Reads the header of a GGUF file: metadata, and where its tensors are. Every count and length is checked before use.

The format is `docs/gguf.md` of ggml, versions 2 and 3, little-endian. Nothing is allocated that the file does not hold,
and no tensor is read here.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, TypeAlias, TypeVar

Value: TypeAlias = bool | int | float | str | tuple[bool | int | float | str, ...]

_VERSIONS: Final = (2, 3)
# The largest published files have 2,000 tensors, 60 keys, vocabularies of 262,144 tokens with 515,000 merges, and chat
# templates of 20 KB; their headers have 16 MB.
_MAX_TENSORS: Final = 100_000
_MAX_KEYS: Final = 4_096
_MAX_ELEMENTS: Final = 4_000_000
_MAX_HEADER_BYTES: Final = 128 << 20
_MAX_TEXT_BYTES: Final = 4 << 20
_MAX_NAME_BYTES: Final = 256
_MAX_DIMENSIONS: Final = 4
_MAX_ALIGNMENT: Final = 1 << 16
_DEFAULT_ALIGNMENT: Final = 32
_TEXT: Final = 8
_ARRAY: Final = 9
_NUMBERS: Final = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


_EXPECTED: Final = {bool: "true or false", float: "a number", int: "a whole number", str: "a text"}
_T = TypeVar("_T")


class GgufRefusedError(ValueError):
    """A file cannot be read as a model; the message says what is wrong and what to do."""


class Packing(NamedTuple):
    """The storage of a tensor's numbers: blocks of `numbers` in `bytes`."""

    name: str
    numbers: int
    bytes: int


PACKINGS: Final = {
    0: Packing("F32", 1, 4),
    1: Packing("F16", 1, 2),
    2: Packing("Q4_0", 32, 18),
    3: Packing("Q4_1", 32, 20),
    6: Packing("Q5_0", 32, 22),
    7: Packing("Q5_1", 32, 24),
    8: Packing("Q8_0", 32, 34),
    12: Packing("Q4_K", 256, 144),
    13: Packing("Q5_K", 256, 176),
    14: Packing("Q6_K", 256, 210),
    30: Packing("BF16", 1, 2),
}
"""The packings that are read, by ggml's number of the type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """One tensor, as the header says."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as in numpy; the file has the row's length first."""
    packing: Packing
    start: int
    """The byte of the file at which it begins."""
    size: int
    """Its bytes in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """The header of a file."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]

    def get(self, key: str, kind: type[_T], default: _T | None = None) -> _T:
        """Return a value of this type: bool, float or str. Raises GgufRefusedError."""
        value = self.metadata.get(key, default)
        if not isinstance(value, kind) or (isinstance(value, float) and not math.isfinite(value)):
            raise self.refused(key, _EXPECTED[kind])
        return value

    def integer(self, key: str, *, default: int | None = None, most: int = 1 << 24) -> int:
        """Return a whole number between 0 and `most`. Raises GgufRefusedError."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise self.refused(key, f"a whole number of 0 to {most}")
        return value

    def values(self, key: str, kind: type[_T]) -> tuple[_T, ...]:
        """Return a list of values of this type: int, float or str. Raises GgufRefusedError."""
        value = self.metadata.get(key)
        listed = value if isinstance(value, tuple) else ()
        values = tuple(item for item in listed if isinstance(item, kind))
        if not isinstance(value, tuple) or len(values) != len(value):
            raise self.refused(key, f"a list with {_EXPECTED[kind]} in each place")
        return values

    def refused(self, key: str, expected: str) -> GgufRefusedError:
        """Return the error for a key of the metadata."""
        value = self.metadata.get(key)
        what = "is not there" if value is None else f"is {str(value)[:40]!r}"
        return GgufRefusedError(f"{self.path}: its key {key} {what}; expected {expected}")


class _Header:
    """Reads the header from its beginning, within its limits."""

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self._file = file
        self.path = path
        self.size = size
        self.position = 0
        self._elements = 0

    def take(self, count: int) -> bytes:
        """Return the next bytes. Raises GgufRefusedError if the file or the limit ends before."""
        self.position += count
        if self.position > min(self.size, _MAX_HEADER_BYTES):
            limit = "the file" if self.size < _MAX_HEADER_BYTES else f"{_MAX_HEADER_BYTES} bytes"
            raise GgufRefusedError(
                f"{self.path}: its header continues behind the end of {limit}: the download was not finished, or it is "
                "damaged; download it again"
            )
        piece = self._file.read(count)
        if len(piece) != count:
            raise GgufRefusedError(f"{self.path} became shorter while it was read")
        return piece

    def number(self, code: str) -> int:
        return int(struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0])

    def count(self, what: str, most: int) -> int:
        count = self.number("Q")
        if count > most:
            raise GgufRefusedError(
                f"{self.path} says that it has {count} {what}; at most {most} are read: it is damaged; download it again"
            )
        return count

    def text(self, most: int = _MAX_TEXT_BYTES) -> str:
        return self.take(self.count("bytes in a text", most)).decode(errors="replace")

    def value(self) -> Value:
        kind = self.number("I")
        if kind != _ARRAY:
            return self._values(kind, 1)[0]
        kind = self.number("I")
        count = self.count("values in a list", _MAX_ELEMENTS - self._elements)
        self._elements += count
        return self._values(kind, count)

    def _values(self, kind: int, count: int) -> tuple[bool | int | float | str, ...]:
        if kind == _TEXT:
            return tuple(self.text() for _ in range(count))
        if kind not in _NUMBERS:
            raise GgufRefusedError(
                f"{self.path} has a value of the unknown type {kind} before byte {self.position}: it is damaged; "
                "download it again"
            )
        code = f"<{count}{_NUMBERS[kind]}"
        return struct.unpack(code, self.take(struct.calcsize(code)))


def read_header(path: Path) -> GgufFile:
    """Return the header of a GGUF file. Takes time and memory in proportion to the header's bytes, 128 MiB at most.

    Raises:
        GgufRefusedError: it is no GGUF file, damaged, or packed in a way that is not read.
        OSError: the file cannot be read.

    """
    with path.open("rb") as file:
        header = _Header(file, path, path.stat().st_size)
        if header.size < 4 or header.take(4) != b"GGUF":
            raise GgufRefusedError(f"{path} is no GGUF file: it does not begin with GGUF")
        version = header.number("I")
        if version not in _VERSIONS:
            raise GgufRefusedError(
                f"{path} is of version {version}; little-endian files of the versions 2 and 3 are read: download a newer "
                "one of the same model"
            )
        tensor_count = header.count("tensors", _MAX_TENSORS)
        metadata: dict[str, Value] = {}
        for _ in range(header.count("keys", _MAX_KEYS)):
            key = header.text(_MAX_NAME_BYTES)
            if key in metadata:
                raise GgufRefusedError(f"{path} has the key {key!r} twice: it is damaged")
            metadata[key] = header.value()
        rows = [_read_tensor(header) for _ in range(tensor_count)]
    described = GgufFile(path=path, metadata=metadata, tensors={})
    alignment = described.integer(
        "general.alignment", default=_DEFAULT_ALIGNMENT, most=_MAX_ALIGNMENT
    )
    if alignment.bit_count() != 1:
        raise described.refused("general.alignment", "a power of two")
    start = -(-header.position // alignment) * alignment
    return replace(described, tensors=_place(header, rows, start, alignment))


def _read_tensor(header: _Header) -> GgufTensor:
    """Return a tensor whose `start` counts from the first tensor's place."""
    name = header.text(_MAX_NAME_BYTES)
    dimensions = header.number("I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise _damaged(header, name, f"has {dimensions} dimensions; expected 1 to 4")
    shape = tuple(header.number("Q") for _ in range(dimensions))
    kind = header.number("I")
    if kind not in PACKINGS:
        known = ", ".join(packing.name for packing in PACKINGS.values())
        raise GgufRefusedError(
            f"{header.path}: its tensor {name!r} is packed as ggml's type {kind}; {known} are read: download a file of the "
            "model that is packed so, such as Q4_K_M or Q8_0"
        )
    packing = PACKINGS[kind]
    numbers = math.prod(shape)
    if not 0 < numbers <= header.size * packing.numbers or shape[0] % packing.numbers:
        raise _damaged(header, name, f"has the impossible shape {shape} in {packing.name}")
    size = numbers // packing.numbers * packing.bytes
    return GgufTensor(
        name=name, shape=shape[::-1], packing=packing, start=header.number("Q"), size=size
    )


def _place(
    header: _Header, rows: Sequence[GgufTensor], start: int, alignment: int
) -> dict[str, GgufTensor]:
    """Return the tensors with their places in the file, which must be inside of it and apart from each other."""
    end = 0
    tensors: dict[str, GgufTensor] = {}
    for row in sorted(rows, key=lambda row: row.start):
        if row.name in tensors:
            raise _damaged(header, row.name, "is there twice")
        if row.start % alignment or row.start < end:
            raise _damaged(header, row.name, f"begins at byte {row.start}, which another one has")
        end = row.start + row.size
        if start + end > header.size:
            raise _damaged(header, row.name, "ends behind the end of the file")
        tensors[row.name] = replace(row, start=start + row.start)
    return tensors


def _damaged(header: _Header, name: str, what: str) -> GgufRefusedError:
    return GgufRefusedError(
        f"{header.path}: its tensor {name[:80]!r} {what}: the download was not finished, or it is damaged; download it "
        "again"
    )
