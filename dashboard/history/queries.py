"""Reads of the history: series, requests. Each read opens the file anew, in a thread, within a limit of time."""

import asyncio
import contextlib
import math
import sqlite3
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from dashboard.history.database import FILE, KNOWN_STEPS, parse_requests
from dashboard.history.records import (
    CHUNK,
    COARSE_S,
    COLUMNS,
    FINE_KEPT_S,
    FINE_S,
    RequestSums,
    request_metric,
    unpack_values,
)
from machinery.clock import Clock
from schemas.wire.requests import EndedRequest

T = TypeVar("T")
Point = tuple[float | None, float | None, float | None]
"""Least, mean and largest value in a step; None where nothing was measured."""

_MOST_SECONDS: Final = 5.0
_AT_ONCE: Final = 2
_PROGRESS: Final = 10_000
MOST_POINTS: Final = 2000


class ReadError(Exception):
    """The history cannot be read now; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesQuery:
    """Choice of series, from when to when, and in which steps; times in seconds since 1970."""

    kind: str
    name: str
    metrics: tuple[str, ...]
    begin_s: int
    end_s: int
    step_s: int
    tier_s: int
    """The tier that is read; `step_s` is a multiple of it."""

    @property
    def steps(self) -> int:
        """The number of steps."""
        return max(0, -(-(self.end_s - self.begin_s) // self.step_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestQuery:
    """Filters of ended requests; times in seconds since 1970. Empty texts and sets match everything."""

    begin_s: float
    end_s: float
    limit: int
    outcomes: frozenset[str] = frozenset()
    model: str = ""
    node: str = ""
    key: str = ""
    gateway: str = ""
    id: str = ""
    least_ms: float = 0.0

    def matches(self, one: EndedRequest) -> bool:
        """Return whether a request is wanted, as the file's own query decides it."""
        wanted = (
            (self.model, one.model),
            (self.node, one.worker),
            (self.key, one.api_key),
            (self.gateway, one.gateway),
            (self.id, one.id),
        )
        return (
            self.begin_s <= one.time_s + one.whole_s < self.end_s
            and (not self.outcomes or one.outcome in self.outcomes)
            and all(not text or text == value for text, value in wanted)
            and one.latency_ms >= self.least_ms
        )


def align(
    begin_s: float, end_s: float, *, wanted_s: float, now_s: float
) -> tuple[int, int, int, int]:
    """Return begin, end, step and tier of a series, in steps of at least `wanted_s`. Pure.

    The fine tier is read if it is kept for the whole time.
    """
    tier_s = FINE_S if begin_s >= now_s - FINE_KEPT_S else COARSE_S
    step_s = max(1, math.ceil(wanted_s / tier_s)) * tier_s
    return int(begin_s) // step_s * step_s, -(-int(end_s) // step_s) * step_s, step_s, tier_s


@dataclass(slots=True)
class HistoryReader:
    """Reads the file in a folder; at most two reads run at a time."""

    folder: Path
    clock: Clock
    opened: Callable[[], Awaitable[object]] | None = None
    """Waits until the file is there: before that, it has no tables."""
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_AT_ONCE))

    async def read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """Run a query in a thread.

        Raises:
            ReadError: the file cannot be read, or the query takes too long.

        """
        if self.opened is not None:
            await self.opened()
        async with self._slots:
            return await asyncio.to_thread(self._read, query)

    def _read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        ends_s = self.clock.monotonic() + _MOST_SECONDS
        try:
            uri = f"{(self.folder / FILE).as_uri()}?mode=ro"
            with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=2.0)) as db:
                db.set_progress_handler(lambda: int(self.clock.monotonic() > ends_s), _PROGRESS)
                return query(db)
        except sqlite3.Error as error:
            if "interrupted" in str(error):
                why = (
                    f"it takes longer than {_MOST_SECONDS:g} s; ask for less time or fewer objects"
                )
                raise ReadError(why) from error
            raise ReadError(str(error)) from error

    async def series(self, query: SeriesQuery) -> dict[str, list[Point]]:
        """Return the points of each metric. Raises ReadError."""
        return await self.read(lambda db: dict(_read_series(db, query)))

    async def requests(self, query: RequestQuery) -> list[EndedRequest]:
        """Return ended requests, newest first. Raises ReadError."""
        return await self.read(lambda db: _read_requests(db, query))


def _read_series(db: sqlite3.Connection, query: SeriesQuery) -> Iterator[tuple[str, list[Point]]]:
    columns = COLUMNS[query.kind]
    rows = _read_rows(db, query) if set(columns) & set(query.metrics) else []
    sums = _read_sums(db, query) if set(query.metrics) - set(columns) else []
    for metric in query.metrics:
        if metric in columns:
            place = columns.index(metric)
            yield metric, [_range([row[place] for row in step]) for step in rows]
        else:
            found = (
                None if total is None else request_metric(metric, total[1], total[0])
                for total in sums
            )
            yield metric, [(value, value, value) for value in found]


def _range(values: Sequence[float]) -> Point:
    # NaN is the only number that differs from itself; this runs for each point of each series.
    known = [one for one in values if one == one]  # noqa: PLR0124 - see above
    return (min(known), sum(known) / len(known), max(known)) if known else (None, None, None)


def _read_rows(db: sqlite3.Connection, query: SeriesQuery) -> list[list[list[float]]]:
    """Return the values of a subject in each step."""
    rows: list[list[list[float]]] = [[] for _ in range(query.steps)]
    sql = "SELECT slot FROM subjects WHERE kind = ? AND name = ?"
    if (row := db.execute(sql, (query.kind, query.name)).fetchone()) is None:
        return rows
    chunk, place = divmod(row[0], CHUNK)
    count = len(COLUMNS[query.kind])
    sql = "SELECT at, data FROM series WHERE kind = ? AND tier = ? AND chunk = ? AND at >= ? AND at < ? ORDER BY at"
    bounds = (query.kind, query.tier_s, chunk, query.begin_s, query.end_s)
    for at_s, data in db.execute(sql, bounds):
        step = (at_s - query.begin_s) // query.step_s
        rows[step].append(unpack_values(data, place, count))
    return rows


def _read_sums(
    db: sqlite3.Connection, query: SeriesQuery
) -> list[tuple[float, RequestSums] | None]:
    """Return the known seconds and the sums of each step; None where no recorder ran."""
    known = [0.0] * query.steps
    bounds = (query.tier_s, query.begin_s, query.end_s)
    # Requests of a time without a recorder were read from the journals of gateways later.
    for (at_s,) in db.execute(KNOWN_STEPS, bounds * 2):
        known[(at_s - query.begin_s) // query.step_s] += query.tier_s
    found = [RequestSums() for _ in range(query.steps)]
    sql = "SELECT at, data FROM sums WHERE tier = ? AND at >= ? AND at < ?"
    values: tuple[object, ...] = bounds
    if query.kind == "model":
        sql, values = f"{sql} AND model = ?", (*bounds, query.name)
    for at_s, data in db.execute(sql, values):
        found[(at_s - query.begin_s) // query.step_s].add(RequestSums.unpack(data))
    return [
        (seconds, sums) if seconds else None for seconds, sums in zip(known, found, strict=True)
    ]


def _read_requests(db: sqlite3.Connection, query: RequestQuery) -> list[EndedRequest]:
    parts: list[tuple[str, Any]] = [("at >= ?", query.begin_s), ("at < ?", query.end_s)]
    for column, value in (
        *(("model", query.model), ("node", query.node), ("key", query.key)),
        *(("gateway", query.gateway), ("id", query.id)),
    ):
        if value:
            parts.append((f"{column} = ?", value))
    if query.least_ms:
        parts.append(("ms >= ?", query.least_ms))
    where = " AND ".join(part for part, _ in parts)
    values = [value for _, value in parts]
    if query.outcomes:
        where += f" AND outcome IN ({', '.join('?' * len(query.outcomes))})"
        values += sorted(query.outcomes)
    sql = f"SELECT body FROM requests WHERE {where} ORDER BY at DESC LIMIT ?"  # noqa: S608 - columns are ours
    return list(parse_requests(body for (body,) in db.execute(sql, (*values, query.limit))))
