"""The file format of a backup: the keys of a store at one revision, as lines of JSON. Does no I/O on a store.

The first line is a header. One line for each key follows, in the order of the keys' bytes. The last line holds the
number of keys and the SHA-256 of all bytes before it, so that a reader detects a truncated or changed file.
docs/operations/store.md describes the format for other readers.
"""

import base64
import hashlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import BinaryIO, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel

# Incremented when an older mlx-fleet would misread the file.
FORMAT = 1
# Longer than any line that is written: etcd takes 1.5 MiB, which are 2 MiB in base64.
_LONGEST_LINE = 8 * 2**20
# The magic number of bbolt and its offset: recognises an etcd snapshot.
_SNAPSHOT_MAGIC, _MAGIC_AT = b"\xed\xda\x0c\xed", 16


class ArchiveError(Exception):
    """The file is not a valid backup; the message says why."""


class _Line(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, alias_generator=to_camel, populate_by_name=True
    )


class ArchiveHeader(_Line):
    """The origin of a backup."""

    format: int = FORMAT
    created_at: datetime
    fleet_version: str
    etcd_version: str
    store: str
    """The id of the store that was read."""
    revision: int
    """The revision at which every key was read."""
    prefix: str
    """The prefix of every key."""
    authority: str | None = None
    """The keys of the fleet's authority, encrypted with a passphrase; None if they are not in the backup."""


class _FirstLine(_Line):
    mlx_fleet_backup: ArchiveHeader


class _AnyFormat(BaseModel):
    format: int


class _AnyFirst(BaseModel):
    """A first line of any format, including later ones."""

    model_config = ConfigDict(alias_generator=to_camel)

    mlx_fleet_backup: _AnyFormat


class _EntryLine(_Line):
    """A key and its value, as text if they are UTF-8, else as base64."""

    key: str | None = None
    key64: str | None = None
    value: str | None = None
    value64: str | None = None


class _LastLine(_Line):
    keys: int
    sha256: str


L = TypeVar("L", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveEntry:
    """One key of the store."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveSummary:
    """The header, size and checksum of a complete file."""

    header: ArchiveHeader
    keys: int
    size_bytes: int
    sha256: str
    """Of the whole file, as `shasum -a 256 FILE` prints it."""


class ArchiveWriter:
    """Writes an archive to a file, key after key. The file is valid only after `finish`."""

    def __init__(self, file: BinaryIO, header: ArchiveHeader) -> None:
        self._file = file
        self._header = header
        self._digest = hashlib.sha256()
        self._size = 0
        self._keys = 0
        self._write(_FirstLine(mlx_fleet_backup=header))

    def add(self, key: str, value: bytes) -> None:
        """Write a key; keys must come in the order of their bytes."""
        raw = key.encode("utf-8", "surrogateescape")
        key_text, key64 = _text_or_base64(raw)
        text, value64 = _text_or_base64(value)
        self._write(_EntryLine(key=key_text, key64=key64, value=text, value64=value64))
        self._keys += 1

    def finish(self) -> ArchiveSummary:
        """Write the last line."""
        self._write(_LastLine(keys=self._keys, sha256=self._digest.hexdigest()))
        return ArchiveSummary(
            header=self._header,
            keys=self._keys,
            size_bytes=self._size,
            sha256=self._digest.hexdigest(),
        )

    def _write(self, line: BaseModel) -> None:
        raw = line.model_dump_json(by_alias=True, exclude_none=True).encode() + b"\n"
        self._file.write(raw)
        self._digest.update(raw)
        self._size += len(raw)


class ArchiveReader:
    """Reads an archive from a seekable file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._file.seek(0)
        raw = self._file.readline(_LONGEST_LINE)
        if raw[_MAGIC_AT:].startswith(_SNAPSHOT_MAGIC):
            raise ArchiveError(
                "it is a snapshot of etcd; restore it with `etcdutl snapshot restore`"
            )
        try:
            found = _AnyFirst.model_validate_json(raw).mlx_fleet_backup.format
        except ValidationError as error:
            raise ArchiveError("it is not a backup that `fleetctl backup` wrote") from error
        if found > FORMAT:
            raise ArchiveError(
                f"a newer mlx-fleet wrote it (format {found}, this one reads {FORMAT}); restore it "
                "with that version"
            )
        self.header = _parse(_FirstLine, raw, 1).mlx_fleet_backup

    def entries(self) -> Iterator[ArchiveEntry]:
        """Yield every key from the first. The checksum is verified at the end of the iteration.

        Raises:
            ArchiveError: the file was changed or cut short.
            OSError: it cannot be read.

        """
        for found in self._walk():
            if isinstance(found, ArchiveEntry):
                yield found

    def check(self) -> ArchiveSummary:
        """Read the whole file and return its summary; raises as `entries` does."""
        last = deque(self._walk(), maxlen=1).pop()
        assert isinstance(last, ArchiveSummary)
        return last

    def _walk(self) -> Iterator[ArchiveEntry | ArchiveSummary]:
        self._file.seek(0)
        digest, count, before, size = hashlib.sha256(), 0, b"", 0
        for number, raw in enumerate(self._lines(), 1):
            size += len(raw)
            if raw.startswith(b'{"keys":'):
                last = _parse(_LastLine, raw, number)
                if (last.keys, last.sha256) != (count, digest.hexdigest()) or self._file.read(1):
                    raise ArchiveError("its content does not match its checksum: it was changed")
                digest.update(raw)
                yield ArchiveSummary(
                    header=self.header, keys=count, size_bytes=size, sha256=digest.hexdigest()
                )
                return
            digest.update(raw)
            if number == 1:
                continue
            entry, key = _entry(_parse(_EntryLine, raw, number), number)
            if key <= before or not entry.key.startswith(self.header.prefix):
                raise ArchiveError(f"line {number}: the key {entry.key!r} does not belong there")
            count, before = count + 1, key
            yield entry
        raise ArchiveError("its end is missing: it was cut short")

    def _lines(self) -> Iterator[bytes]:
        while raw := self._file.readline(_LONGEST_LINE):
            if not raw.endswith(b"\n"):
                return
            yield raw


def _text_or_base64(raw: bytes) -> tuple[str | None, str | None]:
    try:
        return raw.decode(), None
    except UnicodeDecodeError:
        return None, base64.b64encode(raw).decode()


def _parse(model: type[L], raw: bytes, number: int) -> L:
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise ArchiveError(f"line {number} was changed or is damaged") from error


def _entry(line: _EntryLine, number: int) -> tuple[ArchiveEntry, bytes]:
    """Return the entry on a line, and the key's bytes."""
    try:
        key, value = (
            text.encode() if text is not None else base64.b64decode(coded or "", validate=True)
            for text, coded in ((line.key, line.key64), (line.value, line.value64))
        )
    except ValueError as error:
        raise ArchiveError(f"line {number} was changed or is damaged") from error
    return ArchiveEntry(key=key.decode("utf-8", "surrogateescape"), value=value), key
