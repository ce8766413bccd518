"""Routes of the fleet's state: health, snapshot, views, and the stream of changes."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Final

import orjson
from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse

from dashboard.api.event_stream import StreamSlots, snapshot, stream_events
from dashboard.api.past import PastReader
from dashboard.api.time_parameters import show_time
from dashboard.auth import Visitor
from dashboard.fleet_model import FleetModel
from dashboard.history.moments import Moment
from dashboard.history.writer import HistoryWriter
from dashboard.seed_views import SeedViews
from insight import fleet_views
from insight.conditions import Row
from insight.fleet_views import VIEWS
from machinery.version import version
from schemas.wire.errors import Refusal, RefusedError, invalid
from schemas.wire.health import StoreView

_MAX_ROWS: Final = 500
_MAX_STREAMS: Final = 256
_NO_BUFFER: Final = {"x-accel-buffering": "no"}


@dataclass(frozen=True, slots=True)
class StateRoutes:
    """Handlers of the routes of the fleet's state, one method for each."""

    model: FleetModel
    slots: StreamSlots
    figures: SeedViews
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
        summary = fleet_views.summary(caches) if self.model.is_ready else {}
        status = "ok" if self.model.is_ready else "not synced: etcd was not reached yet"
        if caches.refusal:
            status = f"degraded: the store refuses this process: {caches.refusal}"
        macs = summary.get("macs")
        body: Row = {
            "status": status,
            "version": version(),
            "epoch": self.model.epoch,
            **StoreView(caches.staleness_s(), caches.refusal).fields(),
            "worldSize": macs["online"] if isinstance(macs, dict) else 0,
            "queueDepth": self.figures.queue()["queueDepth"],
            "summary": summary or None,
            "streams": self.slots.count,
            "history": _history(self.history),
        }
        return json_response(body, 200 if self.model.is_ready else 503)

    async def snapshot(
        self,
        view: Annotated[str, Query(max_length=200)] = "",
        at: Annotated[str, Query(max_length=40)] = "",
    ) -> Response:
        """Return the state of the fleet, or of some views (separated by commas), as objects by view. `at`: as it was then."""
        names = parse_views(view)
        if at:
            moment = await self.past.moment(at)
            return json_response(await asyncio.to_thread(past_snapshot, moment, names))
        self._check_ready()
        return json_response(snapshot(self.model, names))

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
        (name,) = parse_views(view[:60]) if "," not in view else (invalid_view(view),)
        head, rows = await self._rows(name, at)
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
            return _moment_head(moment), await asyncio.to_thread(
                fleet_views.rows, moment.caches, view
            )
        self._check_ready()
        state = snapshot(self.model, ())
        head = {key: state[key] for key in ("id", "revision", "at", "ageSeconds")}
        return head, list(self.model.rows(view).values())

    async def stream(
        self,
        request: Request,
        view: Annotated[str, Query(max_length=200)] = "",
        since: Annotated[str, Query(max_length=60)] = "",
        last_event_id: Annotated[str, Header(max_length=60)] = "",
    ) -> Response:
        """Stream changes as server-sent events: `snapshot`, then `patch` with changed columns; resumed by the last id."""
        self._check_ready()
        if self.slots.count >= _MAX_STREAMS:
            message = f"{self.slots.count} streams are open already; close some, or poll /api/v1/snapshot."
            raise RefusedError(Refusal(status=429, message=message, code="too_many_streams"))
        events = stream_events(
            self.model,
            frozenset(parse_views(view)),
            last_event_id or since,
            self.slots,
            client_of(request),
        )
        return StreamingResponse(events, media_type="text/event-stream", headers=_NO_BUFFER)

    def _check_ready(self) -> None:
        if not self.model.is_ready:
            message = "The state of the fleet is not known yet: etcd was not reached since the start. Try again soon."
            raise RefusedError(
                Refusal(status=503, message=message, type="server_error", retry_after_s=1)
            )


def past_snapshot(moment: Moment, views: Iterable[str]) -> Row:
    """Return the state of some views at an earlier time, in the form of `snapshot`; `id` is null. Pure."""
    return {
        **_moment_head(moment),
        "storeRefusal": None,
        "summary": fleet_views.summary(moment.caches),
        "views": {view: fleet_views.rows(moment.caches, view) for view in views},
    }


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


def parse_views(text: str) -> tuple[str, ...]:
    """Return the views that a query names, separated by commas; all for an empty text.

    Raises:
        RefusedError: one does not exist.

    """
    wanted = tuple(filter(None, text.split(",")))
    for one in wanted:
        if one not in VIEWS:
            invalid_view(one)
    return wanted or VIEWS


def invalid_view(name: str) -> str:
    """Refuse a view that does not exist."""
    raise invalid(f"There is no view '{name[:60]}'; there are {', '.join(VIEWS)}.", "view")


def filter_rows(rows: Iterable[Row], text: str) -> list[Row]:
    """Return the rows that match `COLUMN=VALUE`, or contain a text in any column. Pure."""
    column, equals, value = text.partition("=")
    wanted = value.lower() if equals else text.lower()
    found = []
    for row in rows:
        if equals and column in row:
            is_match = _text(row[column]) == wanted
        else:
            is_match = not text or any(text.lower() in _text(one) for one in row.values())
        if is_match:
            found.append(row)
    return found


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value).lower()


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


def json_response(body: object, status: int = 200) -> Response:
    """Return a body as JSON."""
    return Response(orjson.dumps(body), status_code=status, media_type="application/json")
