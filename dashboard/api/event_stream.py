"""Server-sent events with the changes of the fleet model, which a client resumes after a break by the last id.

An id is `EPOCH-PLACE`. A client with an id of another run, or too far behind, gets a `snapshot`; else `patch` events
have the columns that changed since. A `ping` every two seconds shows that the connection lives, and whether the store answers.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field
from typing import Final

import orjson

from dashboard.fleet_model import FleetModel
from insight import fleet_views

_IDLE_S: Final = 2.0
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


async def stream_events(
    model: FleetModel, views: Collection[str], since: str, slots: StreamSlots, client: str
) -> AsyncIterator[bytes]:
    """Yield the changes of some views as events, beginning after the id `since`."""
    is_over = slots.enter(client)
    try:
        place = parse_id(since, model.epoch)
        while not is_over.is_set():
            patch, now = (None, model.place) if place is None else model.since(place)
            if patch is None:
                yield _event("snapshot", model, now, snapshot(model, views))
            elif shown := {view: rows for view, rows in patch.items() if view in views}:
                yield _event("patch", model, now, {"at": _at(model), "views": shown})
            place = now
            if not await _wait(model, place, is_over):
                yield _event("ping", model, place, _health(model))
        yield _event("bye", model, place or 0, {"why": "this client opened a further stream"})
    finally:
        slots.leave(client, is_over)


async def _wait(model: FleetModel, place: int, is_over: asyncio.Event) -> bool:
    """Wait for changes or the end of the stream, two seconds at most; return whether there is any."""
    try:
        async with asyncio.timeout(_IDLE_S), asyncio.TaskGroup() as group:
            waits = [
                group.create_task(model.wait_beyond(place)),
                group.create_task(_until(is_over)),
            ]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for one in waits:
                one.cancel()
    except TimeoutError:
        return False
    return True


async def _until(event: asyncio.Event) -> None:
    await event.wait()


def snapshot(model: FleetModel, views: Collection[str]) -> dict[str, object]:
    """Return the state of some views, with the counts of the fleet and the age of what is known."""
    staleness_s = model.caches.staleness_s()
    return {
        "id": f"{model.epoch}-{model.place}",
        "revision": model.caches.revision,
        "ageSeconds": None if staleness_s is None else round(staleness_s, 3),
        **_health(model),
        "summary": fleet_views.summary(model.caches),
        "views": {view: list(model.rows(view).values()) for view in views},
    }


def _health(model: FleetModel) -> dict[str, object]:
    """Return the time, and how long the store has been silent."""
    return {
        "at": _at(model),
        "storeSilentSeconds": round(model.caches.silent_s(), 1),
        "storeRefusal": model.caches.refusal or None,
    }


def _at(model: FleetModel) -> str:
    return model.now().isoformat(timespec="milliseconds")


def _event(name: str, model: FleetModel, place: int, body: object) -> bytes:
    data = orjson.dumps(body)
    return b"id: %s-%d\nevent: %s\ndata: %s\n\n" % (
        model.epoch.encode(),
        place,
        name.encode(),
        data,
    )
