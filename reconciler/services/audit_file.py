"""The audit log as a file: each recorded change is appended as one line of JSON, also beyond what etcd keeps."""

import asyncio
import json
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from machinery.backoff import Backoff, Retries
from machinery.clock import Clock
from machinery.files import sync
from schemas.change import ChangeRecord
from store import codec, keys
from store.informer import Informer
from store.port import KeyValue, Transport

log = logging.getLogger(__name__)

# Twice what etcd keeps: 10,000 records of up to 1.5 KiB. Older lines can have no record that would be written again.
_TAIL_BYTES: Final = 32 << 20
_BACKOFF: Final = Backoff(first_s=1.0, limit_s=30.0)


@dataclass(frozen=True, slots=True)
class RecordedLine:
    """One record as a line of the file."""

    id: str
    revision: int
    text: bytes


def render_line(item: KeyValue) -> RecordedLine:
    """Return the line of a record. Raises UndecodableError: another release wrote it."""
    record = codec.decode(ChangeRecord, item)
    id_ = item.key.removeprefix(keys.CHANGE_PREFIX)
    tree = {
        "id": id_,
        "revision": item.mod_revision,
        **record.model_dump(mode="json", by_alias=True),
    }
    return RecordedLine(
        id_, item.mod_revision, json.dumps(tree, ensure_ascii=False).encode() + b"\n"
    )


def written_ids(path: Path) -> set[str]:
    """Return the ids of the records at the end of a file; incomplete lines are none. Raises OSError."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).split(b"\n")
    except FileNotFoundError:
        return set()
    return {id_ for line in lines if (id_ := _id_of(line))}


def _id_of(line: bytes) -> str:
    try:
        tree = json.loads(line)
    except ValueError:
        return ""
    return str(tree.get("id", "")) if isinstance(tree, dict) else ""


def append_lines(path: Path, lines: bytes) -> None:
    """Append whole lines to a private file, after a line that a full disk cut off. Raises OSError."""
    # Opened each time: a program that rotates files may rename it.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        is_cut = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        rest = memoryview(b"\n" + lines if is_cut else lines)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        sync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(slots=True)
class AuditFile:
    """Follows the audit log and appends what the file has not. Run `run()` in every reconciler that has a file."""

    transport: Transport
    clock: Clock
    path: Path
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Append each record once, forever; a disk that is full delays lines, and loses none that etcd still has."""
        records = Informer(self.transport, keys.CHANGE_PREFIX, render_line, self.clock)
        records.on_change(lambda _key: self._changed.set())
        async with asyncio.TaskGroup() as group:
            group.create_task(records.run())
            await records.wait_synced()
            self._changed.set()
            await self._append_changes(records)

    async def _append_changes(self, records: Informer[RecordedLine]) -> None:
        retries = Retries(_BACKOFF, self.clock)
        known: set[str] | None = None
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                if known is None:
                    known = await asyncio.to_thread(written_ids, self.path)
                # More records may come while these are written.
                there = tuple(records.items.values())
                lines = [line for line in there if line.id not in known]
                lines.sort(key=lambda one: one.revision)
                if lines:
                    text = b"".join(line.text for line in lines)
                    await asyncio.to_thread(append_lines, self.path, text)
                known = {line.id for line in there}
                retries.reset()
            except OSError as error:
                known = None
                extra = {"file": str(self.path), "why": error.strerror}
                log.warning("changes are not written to the audit file", extra=extra)
                self._changed.set()
                await retries.wait()
