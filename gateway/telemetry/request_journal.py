"""Journal of finished requests: the last few thousand in memory, and all of them in a file if one is configured.

An entry is recorded with the fewest possible steps and rendered only when it is read.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
import orjson

from gateway.forwarding.retry_state import Attempt
from gateway.routing.table import EndpointName
from gateway.telemetry.journal_file import JournalFile
from machinery.clock import Clock
from machinery.prometheus import Gauge
from schemas.wire.requests import EndedRequest, RequestAttempt, RequestTokens

# Clients choose the names, and the memory of the ring is bounded.
_LONGEST = 128
# 64 MB hold some 100,000 requests.
_FILE_BYTES = 64 << 20
_OLD_FILES = 4
_BATCH_S = 1.0
# The limit of entries that wait for the disk: 10 s of the fastest gateway, some 60 MB.
_WAITING_LIMIT = 50_000


class JournalEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request to a model.

    The garbage collector does not know it, because it is in no cycle: to look through thousands of entries would stop
    the gateway for milliseconds.
    """

    time_s: Annotated[float, msgspec.Meta(ge=0, lt=1e11)]
    """Arrival of the complete request, in seconds since 1970."""
    request_id: str
    path: str
    model: str
    """As the client wrote it, truncated."""
    key: str
    """The name of the API key; empty without one."""
    session: str
    """The digest of the session key."""
    is_streamed: bool
    status: int
    """The HTTP status that the client got; 0 if it left before."""
    outcome: str
    strategy: str
    """The load balancing strategy; empty if the model is unknown."""
    served_by: EndpointName | None
    attempts: tuple[Attempt, ...]
    resumptions: int
    queued_s: float
    first_s: float
    """Seconds from arrival to the first event; 0 if the request was not streamed."""
    whole_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    cache_miss: str = ""
    """Explanation of the engine for the tokens of the prompt that it read."""


@dataclass(frozen=True, slots=True)
class JournalPage:
    """Entries for a reader that comes back for more."""

    entries: Sequence[JournalEntry]
    """Oldest first."""
    cursor: str
    """The place after them."""
    lost: int | None
    """The number of entries that the journal dropped before the reader had them; None: unknown."""


def cursor_of(entry: JournalEntry) -> str:
    """Return the name of an entry, for `RequestJournal.after`."""
    return f"{entry.time_s!r}~{entry.request_id}"


class RequestJournal:
    """The last requests."""

    def __init__(self, size: int, run: str = "") -> None:
        """`run` names this run of the gateway; it has no colon and no tilde."""
        self._entries: deque[JournalEntry] = deque(maxlen=size)
        self._run = run
        self._count = 0
        """The number of entries so far, with those that were dropped."""
        self._restored = 0

    def __len__(self) -> int:
        return len(self._entries)

    def extend(self, entries: Sequence[JournalEntry]) -> None:
        """Record finished requests, oldest first."""
        self._entries.extend(entries)
        self._count += len(entries)

    def restore(self, entries: Sequence[JournalEntry]) -> None:
        """Fill the empty journal with entries of an earlier run, oldest first."""
        self.extend(entries)
        self._restored = self._count

    def last(
        self,
        count: int,
        *,
        outcomes: frozenset[str] = frozenset(),
        model: str = "",
        node: str = "",
        id_: str = "",
    ) -> list[JournalEntry]:
        """Return the latest `count` entries, newest first; an empty filter matches all."""
        journal_entries: list[JournalEntry] = []
        for entry in reversed(self._entries):
            if len(journal_entries) >= count:
                break
            if outcomes and entry.outcome not in outcomes:
                continue
            if id_ and entry.request_id != id_:
                continue
            if (not model or entry.model == model) and (not node or node in nodes_of(entry)):
                journal_entries.append(entry)
        return journal_entries

    def page_after(self, cursor: str, count: int) -> JournalPage:
        """Return the oldest `count` entries after the place that a cursor names, for a reader that comes back for more.

        `RUN:PLACE~TIME~ID` names a place by the number of entries before it, and the last of those, by which the next
        run of the gateway finds it among what it restored. Without a cursor, or with one that is unknown, the entries
        are those of this run: the reader may have those that were restored.
        """
        place, lost = self._place_after(cursor)
        oldest = self._count - len(self._entries)
        if place < oldest:
            lost = oldest - place if cursor and lost is not None else lost
            place = oldest
        behind = self._count - place
        # From the newer end: that is where readers are.
        entries = list(islice(reversed(self._entries), max(0, behind - count), behind))[::-1]
        place += len(entries)
        last = entries or (self._entries if place == self._count else ())
        name = f"~{cursor_of(last[-1])}" if last else ""
        return JournalPage(entries, f"{self._run}:{place}{name}", lost)

    def _place_after(self, cursor: str) -> tuple[int, int | None]:
        """Return the place that a cursor names, and 0; if that is unknown, the first of this run, and None."""
        head, _, name = cursor.partition("~")
        run, colon, number = head.rpartition(":")
        if colon and run == self._run and number.isdecimal() and int(number) <= self._count:
            return int(number), 0
        behind = self._behind(name if colon else cursor)
        if behind is not None:
            return self._count - behind, 0
        return self._restored, None if cursor else 0

    def _behind(self, cursor: str) -> int | None:
        """Return the number of entries after the one that `TIME~ID` names; None if it is unknown."""
        time, _, id_ = cursor.partition("~")
        for behind, entry in enumerate(reversed(self._entries) if id_ else ()):
            if entry.request_id == id_ and repr(entry.time_s) == time:
                return behind
        return None


def nodes_of(entry: JournalEntry) -> Iterator[str]:
    """Yield the nodes that were attempts, beginning with the one that answered."""
    if entry.served_by is not None:
        yield entry.served_by.node
    for attempt in entry.attempts:
        yield attempt.endpoint.node


def truncate(name: str) -> str:
    """Return a client's text in a bounded length."""
    return name if len(name) <= _LONGEST else name[:_LONGEST]


_ROWS = msgspec.json.Encoder()


def rows_json(rows: msgspec.Struct | Sequence[msgspec.Struct]) -> orjson.Fragment:
    """Return the JSON of records, to be a part of a larger document."""
    return orjson.Fragment(_ROWS.encode(rows))


def render_entries(entries: Iterable[JournalEntry], gateway: str) -> list[EndedRequest]:
    """Return the entries as they are shown; `gateway` is the id of this gateway.

    A recorder takes a thousand a second from a busy gateway, beside its requests: fields are given by place.
    """
    requests: list[EndedRequest] = []
    for entry in entries:
        endpoint = entry.served_by
        requests.append(
            EndedRequest(
                datetime.fromtimestamp(entry.time_s, UTC),
                entry.request_id,
                gateway,
                entry.model,
                entry.outcome,
                _ms(entry.whole_s),
                RequestTokens(entry.prompt_tokens, entry.cached_tokens, entry.output_tokens),
                _ms(entry.queued_s) if entry.queued_s else 0.0,
                _ms(entry.first_s) if entry.first_s else None,
                None if endpoint is None else endpoint.node,
                None if endpoint is None else endpoint.replica,
                None if endpoint is None else endpoint.deployment,
                entry.key or None,
                entry.path,
                entry.status or None,
                entry.strategy or None,
                entry.is_streamed,
                entry.resumptions,
                tuple(
                    RequestAttempt(
                        attempt.endpoint.replica,
                        attempt.endpoint.node,
                        attempt.outcome,
                        _ms(attempt.ended_s - attempt.began_s),
                        truncate(attempt.why) if attempt.why else None,
                    )
                    for attempt in entry.attempts
                ),
                None if endpoint is None else endpoint.url,
                entry.session or None,
                entry.cache_miss or None,
            )
        )
    return requests


def _ms(seconds: float) -> float:
    """Return milliseconds, to the microsecond; `round` takes four times as long."""
    return int(seconds * 1_000_000 + 0.5) / 1000


def session_digest(session: str) -> str:
    """Return a digest that identifies a conversation at every gateway without revealing its name."""
    return blake2b(session.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()


class JournalWriter:
    """Journal on disk as JSON lines in `path` and up to four older files; `path.1` is the youngest of those.

    A thread writes batches, so serving never waits for the disk. A full or hanging disk loses
    lines, logs one error and has no other effect.
    """

    def __init__(
        self, path: Path, clock: Clock, *, gateway: str, file_bytes: int = _FILE_BYTES
    ) -> None:
        self._clock = clock
        self._file = JournalFile[JournalEntry](
            path,
            lambda batch: _ROWS.encode_lines(render_entries(batch, gateway)),
            file_bytes=file_bytes,
            older_files=_OLD_FILES,
            failure="cannot write the journal; requests are served without it",
        )
        self.write = self._file.write
        """Write entries now; log the first of successive failures."""
        self._waiting: list[JournalEntry] = []
        self._not_queued = 0

    @property
    def lost(self) -> int:
        """The number of requests that could not be written."""
        return self._not_queued + self._file.lost

    def lines(self) -> Iterator[str]:
        """Yield the metrics in Prometheus text format."""
        name, help_ = "fleet_gateway_journal_lost_total", "Requests missing from the journal file."
        return Gauge(name, help_, lambda: self.lost, "counter").lines()

    def extend(self, entries: Sequence[JournalEntry]) -> None:
        """Add the entries to the next batch, as many as may wait."""
        room = _WAITING_LIMIT - len(self._waiting)
        self._waiting += entries[:room]
        self._not_queued += len(entries[room:])

    async def run(self, collect: Callable[[], None] = lambda: None) -> None:
        """Write batches forever; at the end, write the rest if the disk is fast enough.

        `collect` is called before each batch, and adds what is not added yet.
        """
        self._file.start()
        try:
            while True:
                await self._clock.sleep(_BATCH_S)
                collect()
                # While the disk hangs, entries wait here, where they are counted.
                if self._file.is_idle:
                    await self._file.put(self._take())
        finally:
            collect()
            self._file.put_at_once(self._take())
            self._file.close()

    def _take(self) -> Sequence[JournalEntry]:
        batch, self._waiting = self._waiting, []
        return batch
