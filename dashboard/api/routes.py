"""Routes of the fleet's state: health, snapshot, views, and the stream of changes."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Final, TypeAlias

import orjson
from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import StringConstraints

from dashboard.api.event_stream import StateStream, StreamSlots, compressed, counted, snapshot
from dashboard.api.past import PastReader
from dashboard.api.time_parameters import show_time
from dashboard.auth import Visitor
from dashboard.fleet_figures import FleetFigures
from dashboard.fleet_model import LIVE_VIEWS, FleetModel
from dashboard.history.moments import Moment
from dashboard.history.queries import ReadError
from dashboard.history.writer import HistoryWriter
from dashboard.subscription import (
    MOST_SELECTIONS,
    Selection,
    cell_text,
    checked_view,
    parse_selections,
    selected_rows,
)
from insight import fleet_views
from insight.conditions import Row
from machinery.version import version
from schemas.wire.errors import RefusedError, invalid, refused
from schemas.wire.health import StoreView

_MAX_ROWS: Final = 500
_MAX_STREAMS: Final = 256
Selected: TypeAlias = Annotated[
    tuple[Annotated[str, StringConstraints(max_length=400)], ...],
    Query(max_length=MOST_SELECTIONS),
]
_NO_BUFFER: Final = {"x-accel-buffering": "no"}


@dataclass(frozen=True, slots=True)
class StateRoutes:
    """Handlers of the routes of the fleet's state, one method for each."""

    model: FleetModel
    slots: StreamSlots
    figures: FleetFigures
    history: HistoryWriter | None
    past: PastReader

    def add_to(self, router: APIRouter) -> None:
        """Register the routes."""
        for path, answer in (
            ("/health/live", self.live),
            ("/health", self.health),
            ("/api/v1/snapshot", self.snapshot),
            ("/api/v1/view/{view}", self.view),
            ("/api/v1/stream", self.stream),
        ):
            router.add_api_route(path, answer, methods=["GET"])

    async def live(self) -> Response:
        """Report that the process answers; needs no key and tells nothing else."""
        return json_response({"status": "ok"})

    async def health(self) -> Response:
        """Report whether the fleet's state is known and current, and the size of the fleet."""
        caches = self.model.caches
        summary = self.model.summary() if self.model.is_ready else {}
        status = "ok" if self.model.is_ready else "not synced: etcd was not reached yet"
        if caches.refusal:
            status = f"degraded: the store refuses this process: {caches.refusal}"
        macs = summary.get("macs")
        body: Row = {
            "status": status,
            "version": version(),
            "epoch": self.model.epoch,
            **StoreView(caches.staleness_s(), caches.refusal).fields(),
            "worldSize": macs["online"] + macs["degraded"] if isinstance(macs, dict) else 0,
            "queueDepth": sum(self.figures.waiting().values()),
            "summary": summary or None,
            "streams": self.slots.count,
            "history": _history(self.history),
        }
        return json_response(body, 200 if self.model.is_ready else 503)

    async def snapshot(
        self,
        view: Selected = (),
        at: Annotated[str, Query(max_length=40)] = "",
    ) -> Response:
        """Return the state of the fleet as objects by view. `view`: VIEW[:COLUMNS[:COLUMN=VALUE]]; `at`: as it was then."""
        selections = parse_selections(view)
        if at:
            moment = await self.past.moment(at)
            return json_response(await asyncio.to_thread(past_snapshot, moment, selections))
        if not self.model.is_ready:
            return json_response(await self._last_known(selections))
        return json_response(snapshot(self.model, selections))

    async def _last_known(self, selections: Iterable[Selection]) -> Row:
        """Return what the history has of the fleet: the store has not answered since the start of this process."""
        try:
            moment = await self.past.moment("now")
        except (RefusedError, ReadError):
            self._check_ready()
            raise
        thread = await asyncio.to_thread(past_snapshot, moment, selections)
        silent_s = max(moment.age_s or 0.0, self.model.caches.silent_s())
        return {**thread, "storeSilentSeconds": round(silent_s, 1)}

    async def view(
        self,
        view: str,
        filter_: Annotated[str, Query(alias="filter", max_length=200)] = "",
        sort: Annotated[str, Query(max_length=60)] = "name",
        after: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=_MAX_ROWS)] = _MAX_ROWS,
        at: Annotated[str, Query(max_length=40)] = "",
    ) -> Response:
        """Return rows of one view as arrays. `filter`: COLUMN=VALUE or a part of any text; `sort`: COLUMN or -COLUMN."""
        head, rows = await self._rows(checked_view(view), at)
        columns = fleet_views.columns(rows)
        found = sort_rows(filter_rows(rows, filter_), sort, columns)
        shown = found[after : after + limit]
        return json_response(
            {
                **head,
                "columns": columns,
                "rows": [[row[column] for column in columns] for row in shown],
                "total": len(found),
            }
        )

    async def _rows(self, view: str, at: str) -> tuple[Row, list[Row]]:
        """Return what is said of the state, and the rows of a view, now or at an earlier time."""
        if at:
            moment = await self.past.moment(at)
            return _moment_head(moment), await asyncio.to_thread(_past_rows, moment, view)
        self._check_ready()
        self.model.note_read((view,))
        state = snapshot(self.model, ())
        head = {key: state[key] for key in ("id", "revision", "at", "ageSeconds")}
        return head, list(self.model.rows(view).values())

    async def stream(
        self,
        request: Request,
        view: Selected = (),
        since: Annotated[str, Query(max_length=60)] = "",
        last_event_id: Annotated[str, Header(max_length=60)] = "",
    ) -> Response:
        """Stream changes as server-sent events: `snapshot`, then `patch` with changed columns; resumed by the last id."""
        selections = parse_selections(view)
        self._check_ready()
        if self.slots.count >= _MAX_STREAMS:
            message = f"{self.slots.count} streams are open already; close some, or poll /api/v1/snapshot."
            raise refused(429, message, "too_many_streams")
        stream = StateStream(self.model, selections, self.slots)
        events = stream.events(last_event_id or since, client_of(request))
        headers = dict(_NO_BUFFER)
        if takes_gzip(request):
            headers["content-encoding"] = "gzip"
            events = compressed(events, self.slots)
        else:
            events = counted(events, self.slots)
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    def _check_ready(self) -> None:
        if not self.model.is_ready:
            message = "The state of the fleet is not known yet: etcd was not reached since the start. Try again soon."
            raise refused(503, message, retry_after_s=1)


def past_snapshot(moment: Moment, selections: Iterable[Selection]) -> Row:
    """Return the state of some views at an earlier time, in the form of `snapshot`; `id` is null. Pure."""
    return {
        **_moment_head(moment),
        "storeRefusal": None,
        "summary": fleet_views.summary(moment.caches),
        "views": {
            selection.view: selected_rows(selection, _past_rows(moment, selection.view))
            for selection in selections
        },
    }


def _past_rows(moment: Moment, view: str) -> list[Row]:
    """Return the rows of a view at an earlier time; figures are in the series."""
    return [] if view in LIVE_VIEWS else fleet_views.rows(moment.caches, view)


def _moment_head(moment: Moment) -> Row:
    age_s = None if moment.age_s is None else round(moment.age_s, 3)
    return {
        "id": None,
        "revision": moment.revision,
        "at": show_time(moment.at_s),
        "ageSeconds": age_s,
    }


def _history(writer: HistoryWriter | None) -> Row:
    """Return whether the history is written, for /health."""
    if writer is None:
        return {"status": "off: the process has no --state-dir"}
    return {
        "status": f"not written: {writer.problem}" if writer.problem else "ok",
        "bytes": writer.used_bytes,
        "lost": writer.lost,
        "damaged": writer.damaged_times,
    }


def client_of(request: Request) -> str:
    """Return the client that a stream belongs to: its key, its address and its session."""
    visitor: Visitor | None = request.state.visitor
    host = "" if request.client is None else request.client.host
    cookie = request.headers.get("cookie", "")
    return f"{'' if visitor is None else visitor.name} {host} {hash(cookie)}"


def filter_rows(rows: Iterable[Row], text: str) -> list[Row]:
    """Return the rows that match `COLUMN=VALUE`, or contain a text in any column. Pure."""
    column, equals, value = text.partition("=")
    wanted = value.lower() if equals else text.lower()
    found = []
    for row in rows:
        if equals and column in row:
            is_match = cell_text(row[column]) == wanted
        else:
            is_match = not text or any(text.lower() in cell_text(one) for one in row.values())
        if is_match:
            found.append(row)
    return found


def sort_rows(rows: list[Row], column: str, columns: list[str]) -> list[Row]:
    """Return the rows in the order of a column; those without a value come last.

    Raises:
        RefusedError: there is no such column.

    """
    name = column.removeprefix("-")
    if columns and name not in columns:
        raise invalid(f"There is no column '{name[:60]}'; there are {', '.join(columns)}.", "sort")
    known = [row for row in rows if row[name] is not None]
    unknown = [row for row in rows if row[name] is None]
    known.sort(key=lambda row: _sort_key(row[name]), reverse=column.startswith("-"))
    return known + unknown


def _sort_key(value: object) -> tuple[int, float, str]:
    if isinstance(value, int | float):
        return (0, float(value), "")
    return (1, 0.0, str(value))


def takes_gzip(request: Request) -> bool:
    """Return whether a client takes answers that are packed by gzip."""
    return "gzip" in request.headers.get("accept-encoding", "")


def json_response(body: object, status: int = 200) -> Response:
    """Return a body as JSON."""
    return Response(orjson.dumps(body), status_code=status, media_type="application/json")
