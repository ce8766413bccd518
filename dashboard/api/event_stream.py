"""Server-sent events with the changes of the fleet model, which a client resumes after a break by the last id.

An id is `EPOCH-PLACE`. A client with an id of another run, or too far behind, gets a `snapshot`; else `patch` events
have the columns that changed since. States are sent at once, figures at a pace. A `ping` every two seconds shows that the
connection lives, and whether the store answers.
"""

import asyncio
import logging
import zlib
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import orjson

from dashboard.fleet_model import FleetModel
from dashboard.subscription import (
    Patch,
    Selection,
    in_columns,
    merged,
    selected_changes,
    selected_rows,
    split_paced,
    views_read,
)
from insight.conditions import Row

log = logging.getLogger(__name__)

_IDLE_S: Final = 2.0
# Figures are sent once a second, and half as often of a large fleet.
_PACE_S: Final = 1.0
_SLOW_PACE_S: Final = 2.0
_MANY_MACS: Final = 200
# zlib's gzip format, with a window of 16 KiB and little memory: there may be hundreds of streams.
_LEVEL: Final = 4
_GZIP_WINDOW: Final = 16 + 14
_GZIP_MEMORY: Final = 6
_MAX_STREAMS: Final = 3
"""Streams of one client; browsers open six connections to a host at most."""


def parse_id(text: str, epoch: str) -> int | None:
    """Return the place in an id of this epoch; None for any other text."""
    head, _, place = text.rpartition("-")
    if head != epoch or not (place.isascii() and place.isdigit() and len(place) < 16):
        return None
    return int(place)


@dataclass(slots=True)
class StreamSlots:
    """The streams of each client: a further one ends the oldest."""

    page: str = ""
    """The version of the page's files: it is in each snapshot."""
    sent_bytes: int = 0
    """Bytes that all streams have sent, as they are on the wire."""
    _open: dict[str, deque[asyncio.Event]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of open streams."""
        return sum(map(len, self._open.values()))

    def enter(self, client: str) -> asyncio.Event:
        """Return the event that tells a new stream of the client to end."""
        mine = self._open.setdefault(client, deque())
        if len(mine) >= _MAX_STREAMS:
            mine.popleft().set()
        mine.append(is_over := asyncio.Event())
        return is_over

    def leave(self, client: str, is_over: asyncio.Event) -> None:
        """Forget a stream that has ended."""
        mine = self._open.get(client)
        if mine is not None and is_over in mine:
            mine.remove(is_over)
        if not mine:
            self._open.pop(client, None)


@dataclass(slots=True)
class StateStream:
    """One reader's stream: what it selected, what it knows, and what waits for its time."""

    model: FleetModel
    selections: tuple[Selection, ...]
    slots: StreamSlots
    _place: int | None = None
    """The place in the log that was read; None: nothing yet."""
    _known: dict[str, set[str]] = field(default_factory=dict)
    """Names of the rows that the reader has, of views whose rows are chosen by a value."""
    _waiting: Patch = field(default_factory=dict)
    """Figures that are not sent yet."""
    _waiting_place: int = 0
    """The place before the first of them: a reader that resumes gets them again."""
    _paced_at_s: float = float("-inf")
    _summary: Row = field(default_factory=dict)

    async def events(self, since: str, client: str) -> AsyncIterator[bytes]:
        """Yield the changes as events, beginning after the id `since`."""
        is_over = self.slots.enter(client)
        views = [selection.view for selection in self.selections]
        try:
            self._place = parse_id(since, self.model.epoch)
            log.debug(
                "stream opened",
                extra={"views": views, "since": since, "resumed": self._place is not None},
            )
            sent_s = float("-inf")
            while not is_over.is_set():
                # Changes of other views wake the stream, too: a ping is due by time alone.
                event = self._next()
                if not event and self.model.monotonic() - sent_s >= _IDLE_S:
                    event = self._event("ping", _health(self.model))
                if event:
                    yield event
                    sent_s = self.model.monotonic()
                rest_s = max(0.0, sent_s + _IDLE_S - self.model.monotonic())
                await _wait(self.model, self._place or 0, is_over, min(rest_s, self._pause_s()))
            yield self._event("bye", {"why": "this client opened a further stream"})
        finally:
            self.slots.leave(client, is_over)
            log.debug("stream closed", extra={"views": views, "displaced": is_over.is_set()})

    def _next(self) -> bytes:
        """Return the event that is due; empty if there is none."""
        model = self.model
        model.note_read(views_read(self.selections))
        patch, place = (None, model.place) if self._place is None else model.since(self._place)
        if patch is None:
            if self._place is not None:
                log.debug(
                    "reader is too far behind; it gets a snapshot",
                    extra={"place": self._place, "newest": place},
                )
            return self._snapshot()
        now = self._take(patch, place)
        if self._waiting and self._pause_s() <= 0:
            now, self._waiting = merged(self._waiting, now), {}
            self._paced_at_s = model.monotonic()
        body = {view: part for view, rows in now.items() if (part := in_columns(rows))}
        changed: Row = {"views": body} if body else {}
        if (summary := model.summary()) != self._summary:
            self._summary = changed["summary"] = summary
        return self._event("patch", {"at": _at(model), **changed}) if changed else b""

    def _snapshot(self) -> bytes:
        """Return everything that was selected, and begin anew after it."""
        model = self.model
        self._place, self._waiting, self._summary = model.place, {}, model.summary()
        self._known = {
            selection.view: self._matching(selection)
            for selection in self.selections
            if selection.column
        }
        state = snapshot(model, self.selections)
        return self._event("snapshot", {**state, "page": self.slots.page})

    def _take(self, patch: Patch, place: int) -> Patch:
        """Return the changes that are sent at once; figures join those that wait."""
        before, self._place = self._place or 0, place
        now: dict[str, Mapping[str, Row | None]] = {}
        for selection in self.selections:
            if (changes := patch.get(selection.view)) is None:
                continue
            known = self._known.get(selection.view)
            shown = selected_changes(selection, changes, self.model.rows(selection.view), known)
            if selection.column and known is None:
                self._known[selection.view] = self._matching(selection)
            at_once, later = split_paced(selection.view, shown)
            now.update(at_once)
            if any(later.values()):
                self._waiting_place = self._waiting_place if self._waiting else before
                self._waiting = merged(self._waiting, later)
        return now

    def _matching(self, selection: Selection) -> set[str]:
        rows = self.model.rows(selection.view)
        return {name for name, row in rows.items() if selection.matches(row)}

    def _pause_s(self) -> float:
        """Return the seconds until figures are sent; without any, until a reader is told that the connection lives."""
        if not self._waiting:
            return _IDLE_S
        is_large = len(self.model.rows("macs")) > _MANY_MACS
        pace_s = _SLOW_PACE_S if is_large else _PACE_S
        return max(0.0, min(_IDLE_S, self._paced_at_s + pace_s - self.model.monotonic()))

    def _event(self, name: str, body: object) -> bytes:
        place = self._waiting_place if self._waiting else self._place or 0
        head = f"id: {self.model.epoch}-{place}\nevent: {name}\ndata: "
        return head.encode() + orjson.dumps(body) + b"\n\n"


async def compressed(pieces: AsyncIterator[bytes], slots: StreamSlots) -> AsyncIterator[bytes]:
    """Yield the pieces as one gzip stream, each of them readable at once."""
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP_WINDOW, _GZIP_MEMORY)
    async for piece in pieces:
        found = packer.compress(piece) + packer.flush(zlib.Z_SYNC_FLUSH)
        slots.sent_bytes += len(found)
        yield found
    yield packer.flush()


async def counted(pieces: AsyncIterator[bytes], slots: StreamSlots) -> AsyncIterator[bytes]:
    """Yield the pieces as they are."""
    async for piece in pieces:
        slots.sent_bytes += len(piece)
        yield piece


async def _wait(model: FleetModel, place: int, is_over: asyncio.Event, most_s: float) -> None:
    """Wait for changes or the end of the stream, and not longer than `most_s`."""
    try:
        async with asyncio.timeout(most_s), asyncio.TaskGroup() as group:
            waits = [
                group.create_task(model.wait_beyond(place)),
                group.create_task(_until(is_over)),
            ]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
    except TimeoutError:
        pass


async def _until(event: asyncio.Event) -> None:
    await event.wait()


def snapshot(model: FleetModel, selections: Iterable[Selection]) -> dict[str, object]:
    """Return the state of some views, with the counts of the fleet and the age of what is known."""
    staleness_s = model.caches.staleness_s()
    selections = tuple(selections)
    model.note_read(views_read(selections))
    return {
        "id": f"{model.epoch}-{model.place}",
        "revision": model.caches.revision,
        "ageSeconds": None if staleness_s is None else round(staleness_s, 3),
        **_health(model),
        "summary": model.summary(),
        "views": {
            selection.view: selected_rows(selection, model.rows(selection.view).values())
            for selection in selections
        },
    }


def _health(model: FleetModel) -> dict[str, object]:
    """Return the time, and how long the store has been silent."""
    return {
        "at": _at(model),
        "storeSilentSeconds": round(model.store_silent_s(), 1),
        "storeRefusal": model.caches.refusal or None,
    }


def _at(model: FleetModel) -> str:
    return model.now().isoformat(timespec="milliseconds")
