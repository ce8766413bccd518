"""Rows of the views that have no object in the store: the fleet's traffic, requests in flight, and requests that ended.

The page follows them on its stream, as it does the rows of objects. Pure bookkeeping.
"""

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import islice, takewhile

import msgspec

from dashboard.fleet_figures import FleetFigures
from dashboard.fleet_model import ENDED, IN_FLIGHT, TRAFFIC, FleetModel
from insight.conditions import Row
from schemas.wire.requests import EndedRequest, RunningRequest

MOST_ENDED = 200
"""Ended requests in the view: further ones are asked for by their filters."""
# More a second than anyone can read; the newest are shown.
_MOST_NEW = 50


@dataclass(slots=True)
class LiveViews:
    """Writes the rows into the fleet model. Call `update()` once a second."""

    views: FleetFigures
    _since: dict[str, str] = field(default_factory=dict)
    """Begin of each request in flight: computed once, so that a row changes with its progress alone."""
    _ended: dict[str, Row] = field(default_factory=dict)
    """Ended requests by name, the oldest first."""
    _last: EndedRequest | None = None

    def update(self) -> None:
        """Compute the rows anew."""
        model: FleetModel = self.views.model
        model.replace_rows(TRAFFIC, {"fleet": self._traffic()})
        model.replace_rows(IN_FLIGHT, self._in_flight())
        model.replace_rows(ENDED, self._newest_ended())

    def _traffic(self) -> Row:
        snapshot = self.views.snapshot()
        del snapshot["uptimeSeconds"]
        return {
            "name": "fleet",
            **snapshot,
            "startedAt": self.views.started.isoformat(timespec="seconds"),
            "gatewaysSilent": self.views.silent_gateways(),
            "broken24h": self.views.traffic.broken(self.views.clock.now().timestamp()),
        }

    def _in_flight(self) -> dict[str, Row]:
        now, now_s = self.views.clock.now(), self.views.clock.monotonic()
        running = self.views.traffic.running(now_s)
        rows = {
            name: in_flight_row(name, gateway, one, self._begin(name, one, now))
            for gateway, one in running
            for name in (f"{gateway}/{one.id}",)
        }
        self._since = {name: since for name, since in self._since.items() if name in rows}
        return rows

    def _begin(self, name: str, one: RunningRequest, now: datetime) -> str:
        begin = now - timedelta(seconds=one.seconds)
        return self._since.setdefault(name, begin.isoformat(timespec="milliseconds"))

    def _newest_ended(self) -> dict[str, Row]:
        ended = takewhile(lambda one: one is not self._last, reversed(self.views.traffic.ended))
        new = list(islice(ended, _MOST_NEW if self._ended else MOST_ENDED))
        if new:
            self._last = new[0]
        for one in reversed(new):
            row = ended_row(one)
            self._ended[str(row["name"])] = row
        for name in list(self._ended)[:-MOST_ENDED]:
            del self._ended[name]
        return self._ended


def in_flight_row(name: str, gateway: str, one: RunningRequest, since: str) -> Row:
    """Return the row of a request in flight. Pure."""
    found: Row = msgspec.to_builtins(one)
    del found["seconds"]
    return {"name": name, "gateway": gateway, "since": since, **found}


def ended_row(one: EndedRequest) -> Row:
    """Return the row of an ended request: its fields as `/api/v1/requests` has them. Pure."""
    found: Row = msgspec.to_builtins(one)
    return {"name": f"{one.gateway}/{one.id}/{found['time']}", **found}
