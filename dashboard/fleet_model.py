"""One model of the fleet: rows of every view, and a bounded log of their changes that any number of readers follow.

    model = FleetModel(caches, clock, epoch="1f2e")
    group.create_task(model.run())
    changes, place = model.since(place)     # None: too far behind, read a snapshot

A reader keeps its place in the log and nothing is queued for it: a slow one sees the latest values later.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Final, TypeAlias

from dashboard.store_probe import StoreProbe
from insight import fleet_views
from insight.conditions import ObjectCondition, Row, condition_row
from insight.fleet_caches import FleetCaches
from insight.fleet_views import VIEWS, ViewKey
from machinery.clock import Clock
from schemas.meta import Condition

log = logging.getLogger(__name__)

# State changes are shown at most this often; the first one after a pause waits only for those of its own moment.
_BATCH_S, _MOMENT_S = 0.1, 0.01
# Beyond this many changes a reader takes a snapshot. The figures of 1,000 Macs are 100 changes a second, and
# each change holds its columns.
_LOG_LIMIT: Final = 4096

# A free disk that moves less is no change.
_DISK_STEP_BYTES: Final = 256 << 20
_CAUSES: Final = frozenset({"conditions", "models", "replicas"})
"""Views whose rows decide about problems."""
FIGURES: Final = "figures"
"""The view of what agents measure of their Macs."""
TRAFFIC: Final = "traffic"
"""The view of the fleet's sums: one row, `fleet`."""
IN_FLIGHT: Final = "inFlight"
"""The view of the requests in flight at all gateways."""
ENDED: Final = "ended"
"""The view of the requests that ended last."""
CHANGES: Final = "changes"
"""The view of the newest records of the audit log."""
JOIN_REQUESTS: Final = "joinRequests"
"""The view of machines that wait for an approval."""
LIVE_VIEWS: Final = (FIGURES, TRAFFIC, IN_FLIGHT, ENDED, CHANGES, JOIN_REQUESTS)
"""Views without declared objects: they have no earlier moments, and their changes are sent at a pace."""
# A view is read while a client has asked for it within this time; a page that polls asks every 5 s.
_READ_S: Final = 8.0

Patch: TypeAlias = dict[str, dict[str, Row | None]]
"""Changed columns by view and row; None for a row that is gone."""


@dataclass(frozen=True, slots=True)
class RowChange:
    """One changed row: the columns that differ; None if the row is gone."""

    view: str
    name: str
    columns: Row | None


class FleetModel:
    """Rows of every view and their changes. Run `run()` in a task group."""

    def __init__(self, caches: FleetCaches, clock: Clock, probe: StoreProbe, *, epoch: str) -> None:
        """`epoch` distinguishes this run from others: places in the log are of one epoch."""
        self.caches: Final = caches
        self._probe = probe
        self.epoch: Final = epoch
        self._clock = clock
        self._rows: dict[str, dict[str, Row]] = {view: {} for view in (*VIEWS, *LIVE_VIEWS)}
        self._read_at_s: dict[str, float] = {}
        self._log: deque[RowChange] = deque(maxlen=_LOG_LIMIT)
        self._dirty: set[ViewKey] = set()
        self._is_dirty = asyncio.Event()
        self._advanced = asyncio.Event()
        self._ready = asyncio.Event()
        self._measured: dict[str, ObjectCondition] = {}
        self._summary: tuple[object, Row] = (None, {})
        self.place = 0
        """The number of changes so far."""
        caches.on_change(self._note)

    def set_condition(self, kind: str, name: str, condition: Condition | None) -> None:
        """Add a condition that this process measures to those of an object; None removes it."""
        about = f"{kind}/{name}"
        if condition is None:
            self._measured.pop(about, None)
        else:
            self._measured[about] = ObjectCondition(kind, name, condition)
        self._dirty.add(("conditions", about))
        self._is_dirty.set()

    def replace_rows(self, view: str, found: Mapping[str, Row]) -> None:
        """Replace the rows of a live view, by name."""
        before = self.place
        self._replace(view, found)
        self._announce(before)

    def _replace(self, view: str, found: Mapping[str, Row]) -> None:
        for name in set(self._rows[view]) - set(found):
            self._set(view, name, None)
        for name, row in found.items():
            self._set(view, name, row)

    def note_read(self, views: Iterable[str]) -> None:
        """Note that a client reads these views now."""
        self._read_at_s.update(dict.fromkeys(views, self.monotonic()))

    def is_read(self, view: str) -> bool:
        """Return whether any client has read a view lately."""
        return self.monotonic() - self._read_at_s.get(view, float("-inf")) < _READ_S

    def summary(self) -> Row:
        """Return the counts of the fleet and its health in one sentence."""
        caches = self.caches
        parts = (caches.gateways.items, caches.reconcilers.items)
        state = (self.place, *caches.leader.items.values(), *map(len, parts))
        if self._summary[0] != state:
            views = ("macs", "models", "problems")
            found = {view: list(self._rows[view].values()) for view in views}
            silent = self._rows[TRAFFIC].get("fleet", {}).get("gatewaysSilent")
            silent = silent if isinstance(silent, dict) else {}
            self._summary = (state, fleet_views.summary_of(caches, found, silent))
        return self._summary[1]

    @property
    def is_ready(self) -> bool:
        """True once every view was computed for the first time."""
        return self._ready.is_set()

    def now(self) -> datetime:
        """Return the time."""
        return self._clock.now()

    def store_silent_s(self) -> float:
        """Return the seconds since the store stopped to answer; 0.0 while it answers."""
        return max(self.caches.silent_s(), self._probe.silent_s())

    def monotonic(self) -> float:
        """Return the seconds of a clock that never jumps."""
        return self._clock.monotonic()

    async def wait_ready(self) -> None:
        """Wait for the first rows."""
        await self._ready.wait()

    def rows(self, view: str) -> Mapping[str, Row]:
        """Return the rows of a view by name."""
        return self._rows[view]

    def since(self, place: int) -> tuple[Patch | None, int]:
        """Return the columns that changed since a place in the log, None if it is too old, and the place now."""
        missed = self.place - place
        if missed < 0 or missed > len(self._log):
            return None, self.place
        return merge_changes(list(self._log)[len(self._log) - missed :]), self.place

    async def wait_beyond(self, place: int) -> None:
        """Wait until there are changes after a place."""
        while self.place <= place:
            await self._advanced.wait()

    async def run(self) -> None:
        """Keep the rows current, forever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.caches.run())
            group.create_task(self._probe.run())
            await self.caches.wait_synced()
            for view in VIEWS:
                self._rows[view] = {
                    str(row["name"]): row for row in fleet_views.rows(self.caches, view)
                }
            self._ready.set()
            shown_s = self._clock.monotonic()
            while True:
                await self._is_dirty.wait()
                rest_s = shown_s + _BATCH_S - self._clock.monotonic()
                await self._clock.sleep(max(_MOMENT_S, rest_s))
                self._update()
                shown_s = self._clock.monotonic()

    def _note(self, key: str) -> None:
        if not self._ready.is_set():
            return
        self._dirty |= fleet_views.affected(self.caches, key)
        if self._dirty:
            self._is_dirty.set()

    def _update(self) -> None:
        dirty, self._dirty = self._dirty, set()
        self._is_dirty.clear()
        before = self.place
        log.debug("rows computed", extra={"count": len(dirty)})
        for view, name in sorted(dirty):
            if view == "conditions":
                self._update_conditions(name)
            elif view != "problems":
                self._set(view, name, fleet_views.row(self.caches, view, name))
        has_leader_changed = any(view == "problems" for view, _ in dirty)
        if has_leader_changed or self._has_cause_changed(self.place - before):
            rows = fleet_views.problem_rows(self.caches, self._measured.values())
            self._replace("problems", {str(row["name"]): row for row in rows})
        self._announce(before)

    def _has_cause_changed(self, count: int) -> bool:
        """Return whether one of the last changes may make or end a problem: all of them are computed together."""
        newest = islice(reversed(self._log), count)
        return any(change.view in _CAUSES for change in newest)

    def _announce(self, before: int) -> None:
        """Wake the readers if there are changes since a place."""
        if self.place != before:
            self._advanced.set()
            self._advanced = asyncio.Event()

    def _update_conditions(self, about: str) -> None:
        """Update all conditions of an object, `Kind/name`."""
        kind, _, name = about.partition("/")
        rows = fleet_views.conditions_of(self.caches, kind, name)
        if about in self._measured:
            rows.append(condition_row(self._measured[about], self.caches))
        found = {str(row["name"]): row for row in rows}
        gone = [row for row in self._rows["conditions"] if row.rpartition("/")[0] == about]
        for one in {*gone, *found}:
            self._set("conditions", one, found.get(one))

    def _set(self, view: str, name: str, after: Row | None) -> None:
        before = self._rows[view].get(name)
        if after is None:
            if self._rows[view].pop(name, None) is not None:
                self._append(RowChange(view, name, None))
            return
        if before is not None and _is_near(before.get("diskFreeBytes"), after.get("diskFreeBytes")):
            after = {**after, "diskFreeBytes": before["diskFreeBytes"]}
        columns = {
            column: value
            for column, value in after.items()
            if before is None or before.get(column) != value
        }
        self._rows[view][name] = after
        if columns:
            self._append(RowChange(view, name, columns))

    def _append(self, change: RowChange) -> None:
        self._log.append(change)
        self.place += 1


def _is_near(before: object, after: object) -> bool:
    """Return whether two sizes of a free disk are shown as the same."""
    if not isinstance(before, int) or not isinstance(after, int):
        return False
    return abs(before - after) < _DISK_STEP_BYTES


def merge_changes(changes: Iterable[RowChange]) -> Patch:
    """Return the columns of several changes, the latest value of each. Pure."""
    patch: Patch = {}
    for change in changes:
        of_view = patch.setdefault(change.view, {})
        before = of_view.get(change.name)
        if change.columns is None:
            of_view[change.name] = None
        else:
            of_view[change.name] = {**(before or {}), **change.columns}
    return patch
