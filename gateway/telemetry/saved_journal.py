"""Saved journal: the last requests in two files of the state folder, with which a gateway starts after kill -9.

    saved = SavedJournal(folder / "requests.jsonl", journal, clock, size=10_000)
    saved.restore()
    group.create_task(saved.run())

New entries are taken from the journal four times a second, encoded in slices between other work, and written by a
thread. What ended in the last quarter of a second before a kill is lost. A full, hanging or damaged disk costs
entries, one log line and nothing else.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import msgspec
import orjson

from gateway.forwarding.retry_state import Attempt
from gateway.routing.table import EngineEndpoint
from gateway.telemetry.journal_file import JournalFile
from gateway.telemetry.request_journal import (
    JournalEntry,
    RequestJournal,
    SessionDigest,
    session_digest,
)
from machinery.clock import Clock
from machinery.prometheus import Gauge
from schemas.wire.engine_address import SYSTEM_AUTHORITIES, EngineAddress

log = logging.getLogger(__name__)

_INTERVAL_S: Final = 0.25
_ENTRY_BYTES: Final = 512
_LEAST_BYTES: Final = 256 << 10
_LONGEST_LINE: Final = 64 << 10
_REQUEST_ID, _SESSION, _SERVED_BY, _ATTEMPTS = map(
    JournalEntry.__struct_fields__.index, ("request_id", "session", "served_by", "attempts")
)
_Place: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, lt=1e11)]
_Attempt: TypeAlias = tuple[_Place, str, float, float, str]
_Endpoint: TypeAlias = tuple[str, str, str, str, int, str, str, str, bool]
_Line: TypeAlias = tuple[
    _Seconds, str, str, str, str, str, bool, int, str, str, _Place | None, list[_Attempt],
    int, float, float, float, int, int, int, str, list[_Endpoint],
]  # fmt: skip
"""The types of a line, by place."""
_LINE: Final = msgspec.json.Decoder(_Line)
METRIC: Final = "fleet_gateway_journal_unsaved_total"


class SavedJournal:
    """Restores a journal from its files, and keeps them up to date."""

    def __init__(self, path: Path, journal: RequestJournal, clock: Clock, *, size: int) -> None:
        """`size` is the number of entries that the journal keeps; two files hold at least as many."""
        self._path, self._older = path, path.with_name(f"{path.name}.1")
        self._journal = journal
        self._clock = clock
        self._size = size
        self._file_bytes = max(_LEAST_BYTES, size * _ENTRY_BYTES)
        self._file = JournalFile[JournalEntry](
            path,
            encode_entries,
            file_bytes=self._file_bytes,
            older_files=1,
            failure="cannot save the journal; a restart forgets requests",
        )
        self.write = self._file.write
        """Write entries now; log the first of successive failures."""
        self._cursor = ""
        self._not_queued = 0

    def lines(self) -> Iterator[str]:
        """Yield the metric in Prometheus text format."""
        help_ = "Requests that a restart forgets, because they could not be written to --state-dir."
        return Gauge(METRIC, help_, lambda: self._not_queued + self._file.lost, "counter").lines()

    def restore(self) -> int:
        """Fill the empty journal with the saved entries, oldest first; return their number.

        Lines that are torn, damaged or of another release are skipped; files that cannot be read count as empty.
        """
        entries: list[JournalEntry] = []
        damaged = 0
        for path in (self._older, self._path):
            raw = self._read(path)
            for line in raw.splitlines():
                entry = decode_entry(line)
                if entry is not None:
                    entries.append(entry)
                else:
                    damaged += bool(line)
            self._file.is_torn = bool(raw) and not raw.endswith(b"\n")
        self._journal.restore(entries[-self._size :])
        self._cursor = self._journal.page_after("", 0).cursor
        if damaged:
            log.warning(
                "lines of the saved journal were skipped",
                extra={"path": str(self._path), "lines": damaged, "read": len(entries)},
            )
        return len(entries)

    def _read(self, path: Path) -> bytes:
        """Return the end of a file, at most as much as is kept; empty if it cannot be read."""
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                # A batch is written as a whole, so a file may be a little larger than its limit.
                file.seek(max(0, size - 2 * self._file_bytes))
                return file.read(2 * self._file_bytes)
        except FileNotFoundError:
            return b""
        except OSError as error:
            why = error.strerror or str(error)
            log.warning("cannot read the saved journal", extra={"path": str(path), "why": why})
            return b""

    async def run(self, collect: Callable[[], None] = lambda: None) -> None:
        """Save new entries forever; at the end, save the rest if the disk is fast enough.

        `collect` is called before the last ones are taken, and adds to the journal what is not added yet.
        """
        with suppress(OSError):  # which the first write reports
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file.start()
        try:
            while True:
                await self._clock.sleep(_INTERVAL_S)
                # While the disk hangs, entries wait in the journal, as many as it keeps.
                if self._file.is_idle:
                    await self._file.put(self._take())
        finally:
            collect()
            self._file.put_at_once(self._take())
            self._file.close()

    def _take(self) -> Sequence[JournalEntry]:
        """Return the entries that ended since the last call."""
        page = self._journal.page_after(self._cursor, self._size)
        self._cursor = page.cursor
        self._not_queued += page.lost or 0
        return page.entries


def encode_entries(entries: Sequence[JournalEntry]) -> bytes:
    """Return entries as lines, without prompts, and with a digest in place of the session.

    A line is an array: the fields of the entry, then the endpoints, which the fields name by their place.
    """
    encoded: dict[int, list[object]] = {}
    """The endpoints that alone answered a request, by identity."""
    lines: list[bytes] = []
    for entry in entries:
        served_by, attempts = entry.served_by, entry.attempts
        if len(attempts) != 1 or served_by is None or attempts[0].endpoint is not served_by:
            tried = [attempt.endpoint for attempt in attempts]
            known = list(dict.fromkeys(tried if served_by is None else [*tried, served_by]))
            lines.append(
                _encode(
                    entry, known, [_encode_endpoint(engine_endpoint) for engine_endpoint in known]
                )
            )
            continue
        # Nearly always. Hashing endpoints would take most of the time.
        endpoint = encoded.get(id(served_by))
        if endpoint is None:
            endpoint = encoded[id(served_by)] = [_encode_endpoint(served_by)]
        lines.append(_encode(entry, (served_by,), endpoint))
    lines.append(b"")
    return b"\n".join(lines)


def _encode(
    entry: JournalEntry, endpoints: Sequence[EngineEndpoint], encoded: list[object]
) -> bytes:
    """Return the line of an entry whose endpoints are these."""
    values: list[object] = [*msgspec.structs.astuple(entry), encoded]
    values[_REQUEST_ID] = entry.request_id.decode("ascii")
    if entry.session:
        values[_SESSION] = session_digest(entry.session)
    if entry.served_by is not None:
        values[_SERVED_BY] = endpoints.index(entry.served_by)
    values[_ATTEMPTS] = [
        (
            endpoints.index(attempt.endpoint),
            attempt.outcome,
            attempt.began_s,
            attempt.ended_s,
            attempt.why,
        )
        for attempt in entry.attempts
    ]
    try:
        return orjson.dumps(values)
    except TypeError:  # half a surrogate pair of a client, which UTF-8 cannot spell
        return json.dumps(values, ensure_ascii=False).encode("utf-8", "replace")


def _encode_endpoint(endpoint: EngineEndpoint) -> list[object]:
    origin = endpoint.origin
    # The certificates of an external server are long, and only their presence shows.
    is_trusting = bool(origin.authorities)
    return [endpoint.replica, endpoint.node, endpoint.deployment, *origin[:5], is_trusting]


def decode_entry(line: bytes) -> JournalEntry | None:
    """Return the entry of a line; None if the line is damaged or has another form."""
    if len(line) > _LONGEST_LINE:
        return None
    try:
        decoded: Any = _LINE.decode(line)
        *values, known = decoded
        endpoints = [_decode_endpoint(one) for one in known]
        served_by = values[_SERVED_BY]
        values[_REQUEST_ID] = values[_REQUEST_ID].encode("ascii")
        values[_SESSION] = SessionDigest(values[_SESSION])
        values[_SERVED_BY] = None if served_by is None else endpoints[served_by]
        values[_ATTEMPTS] = tuple(Attempt(endpoints[at], *rest) for at, *rest in values[_ATTEMPTS])
    except (msgspec.DecodeError, ValueError, IndexError):
        return None
    return JournalEntry(*values)


def _decode_endpoint(values: _Endpoint) -> EngineEndpoint:
    """Return an endpoint that serves for rendering alone."""
    replica, node, deployment, host, port, socket, of_node, external, is_trusting = values
    authorities = SYSTEM_AUTHORITIES if is_trusting else ""
    return EngineEndpoint(
        replica=replica,
        node=node,
        deployment=deployment,
        origin=EngineAddress(host, port, socket, of_node, external, authorities),
        names=(),
        version=0,
    )
