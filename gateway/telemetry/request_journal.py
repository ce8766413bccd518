"""Which engine served which request, and what became of it: the last few thousand, and on disk if somebody wants them.

Written down in the fewest possible steps when a request ends; made into words when somebody asks.

The journal on disk: JSON lines, written in batches by a thread. Serving never waits for it.

A disk that is full or hangs costs lines of this file, one line of the log, and nothing else.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple, TypeAlias

import orjson

from gateway.forwarding.retry_state import Attempt
from gateway.routing.table import EngineEndpoint
from machinery.clock import Clock
from machinery.prometheus import family_header

Json: TypeAlias = dict[str, object]

# Names are a stranger's, and the ring must stay as small as it says.
_LONGEST = 128


class JournalEntry(NamedTuple):
    """One request to a model. A tuple, for each costs its request time."""

    time_s: float
    """When it was all here: seconds since 1970."""
    request_id: bytes
    path: str
    model: str
    """As the client wrote it, cut off where it is too long."""
    key: str
    """The name of its API key; empty without one."""
    session: str
    """What the conversation sticks by; never shown as it is."""
    is_streamed: bool
    status: int
    """What the client got; 0 if it left before."""
    outcome: str
    strategy: str
    """By which the engine was chosen; empty if none was."""
    served_by: EngineEndpoint | None
    tried: Sequence[Attempt]
    resumptions: int
    queued_s: float
    first_s: float
    """From its arrival to the first event of its stream; 0 if it was no stream."""
    whole_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class RequestJournal:
    """The last requests. `taker`, if there is one, gets each of them, too."""

    def __init__(self, size: int) -> None:
        self._entries: deque[JournalEntry] = deque(maxlen=size)
        self.add = self._entries.append
        """Note a request that ended."""

    def __len__(self) -> int:
        return len(self._entries)

    def last(
        self,
        count: int,
        *,
        outcomes: frozenset[str] = frozenset(),
        model: str = "",
        node: str = "",
    ) -> list[JournalEntry]:
        """Return so many of the latest, the newest first; an empty filter lets all through."""
        found: list[JournalEntry] = []
        for entry in reversed(self._entries):
            if len(found) >= count:
                break
            if outcomes and entry.outcome not in outcomes:
                continue
            if (not model or entry.model == model) and (not node or node in nodes_of(entry)):
                found.append(entry)
        return found


def nodes_of(entry: JournalEntry) -> Iterator[str]:
    """Yield the Macs that were asked, who answered first."""
    if entry.served_by is not None:
        yield entry.served_by.node
    for one in entry.tried:
        yield one.target.node


def truncate(name: str) -> str:
    """Return a stranger's word in a length that can be kept."""
    return name if len(name) <= _LONGEST else name[:_LONGEST]


def render_entries(entries: Iterable[JournalEntry], gateway: str) -> list[Json]:
    """Return them as the API and the file have them; `gateway` is who served them."""
    return [_render_entry(entry, gateway) for entry in entries]


def _render_entry(entry: JournalEntry, gateway: str) -> Json:
    target = entry.served_by
    return {
        "time": datetime.fromtimestamp(entry.time_s, tz=UTC).isoformat(timespec="milliseconds"),
        "id": entry.request_id.decode("ascii"),
        "gateway": gateway,
        "path": entry.path,
        "model": entry.model,
        "deployment": target.deployment if target is not None else None,
        "replica": target.replica if target is not None else None,
        "worker": target.node if target is not None else None,
        "endpoint": _url(target) if target is not None else None,
        "strategy": entry.strategy or None,
        "attempts": [
            {
                "replica": one.target.replica,
                "worker": one.target.node,
                "outcome": one.outcome,
                "ms": _ms(one.ended_s - one.began_s),
                "why": truncate(one.why) or None,
            }
            for one in entry.tried
        ],
        "resumptions": entry.resumptions,
        "streamed": entry.is_streamed,
        "status": entry.outcome,
        "httpStatus": entry.status or None,
        "queueMs": _ms(entry.queued_s),
        "firstTokenMs": _ms(entry.first_s) if entry.first_s else None,
        "latencyMs": _ms(entry.whole_s),
        "tokens": {
            "prompt": entry.prompt_tokens,
            "cached": entry.cached_tokens,
            "output": entry.output_tokens,
        },
        "apiKey": entry.key or None,
        "session": session_digest(entry.session) if entry.session else None,
    }


def _url(target: EngineEndpoint) -> str:
    host, port = target.origin
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def session_digest(session: str) -> str:
    """Return what tells one conversation from another at every gateway, and nothing of what it is called."""
    return blake2b(session.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()


log = logging.getLogger(__name__)

# 64 MB hold some 100,000 requests.
_FILE_BYTES = 64 << 20
_OLD_FILES = 4
_BATCH_S = 1.0
# What may wait for the disk: 10 s of the fastest gateway, some 60 MB.
_WAITING_LIMIT = 50_000
# For the last batch, when the process ends.
_GOODBYE_S = 2.0


class JournalWriter:
    """`path` and up to four older ones, `path.1` being the youngest of those. `run()` writes."""

    def __init__(
        self, path: Path, clock: Clock, *, gateway: str, file_bytes: int = _FILE_BYTES
    ) -> None:
        self._path = path
        self._clock = clock
        self._gateway = gateway
        self._file_bytes = file_bytes
        self._waiting: list[JournalEntry] = []
        self._batches: SimpleQueue[list[JournalEntry] | None] = SimpleQueue()
        self._is_failing = False
        # Two numbers, for two threads count.
        self._not_taken = self._not_written = 0

    @property
    def lost(self) -> int:
        """How many requests are not in the file because it could not be written."""
        return self._not_taken + self._not_written

    def lines(self) -> Iterator[str]:
        """Yield Prometheus' text."""
        name = "fleet_gateway_journal_lost_total"
        yield from family_header(
            name, "Requests that could not be written to the journal's file.", "counter"
        )
        yield f"{name} {self.lost}"

    def add(self, entry: JournalEntry) -> None:
        """Have it written with the next batch."""
        if len(self._waiting) < _WAITING_LIMIT:
            self._waiting.append(entry)
        else:
            self._not_taken += 1

    async def run(self) -> None:
        """Write, for ever; what waits at the end is written as well, if the disk takes it in time."""
        # Not the loop's own threads: the process would wait for one whose disk hangs.
        writer = threading.Thread(target=self._write_all, daemon=True)
        writer.start()
        try:
            while True:
                await self._clock.sleep(_BATCH_S)
                # While the disk hangs they wait here, where they are counted.
                if self._waiting and self._batches.empty():
                    self._hand_over()
        finally:
            self._hand_over()
            self._batches.put(None)
            writer.join(_GOODBYE_S)

    def _hand_over(self) -> None:
        batch, self._waiting = self._waiting, []
        self._batches.put(batch)

    def _write_all(self) -> None:
        while (batch := self._batches.get()) is not None:
            self.write(batch)

    def write(self, batch: list[JournalEntry]) -> None:
        """Write them now; that it fails is told in the log, once until it works again."""
        why = self._written(batch)
        if why is None:
            self._is_failing = False
            return
        self._not_written += len(batch)
        if not self._is_failing:
            self._is_failing = True
            log.error(
                "the journal cannot be written; requests are served without it",
                extra={"path": str(self._path), "why": why},
            )

    def _written(self, batch: list[JournalEntry]) -> str | None:
        """Write them; return why that failed, None if it did not."""
        if not batch:
            return None
        lines = b"".join(orjson.dumps(one) + b"\n" for one in render_entries(batch, self._gateway))
        try:
            self._make_room()
            # Only its owner: it says who asked what for how long.
            number = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                if os.write(number, lines) != len(lines):
                    return "the disk took a part of it only"
            finally:
                os.close(number)
        except OSError as error:
            return error.strerror or str(error)
        return None

    def _make_room(self) -> None:
        """Begin a new file if the one there is large. Raises OSError."""
        try:
            if self._path.stat().st_size < self._file_bytes:
                return
        except FileNotFoundError:
            return
        for number in range(_OLD_FILES - 1, 0, -1):
            older = self._old(number)
            if older.exists():
                older.replace(self._old(number + 1))
        self._path.replace(self._old(1))

    def _old(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")
