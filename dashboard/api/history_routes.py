"""Routes of the history: series of figures, and ended requests of the last 24 hours."""

import re
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Query, Response

from dashboard.api.past import no_history
from dashboard.api.routes import json_response
from dashboard.api.time_parameters import parse_range, show_time
from dashboard.energy import ENERGY_METRICS, energy_row
from dashboard.history.queries import MOST_POINTS, HistoryReader, RequestQuery, SeriesQuery, align
from dashboard.history.records import COLUMNS, metrics_of
from dashboard.traffic import Traffic
from insight.conditions import Row
from machinery.clock import Clock
from schemas import duration as durations
from schemas.wire.errors import invalid
from schemas.wire.metrics import parse_outcomes

_DEFAULT_POINTS: Final = 360
_MOST_REQUESTS: Final = 1000
_MOST_METRICS: Final = 20
_MOST_SUBJECTS: Final = 50
_UNITS: Final = (
    (re.compile(r"_bytes$"), "bytes"),
    (re.compile(r"_bytes_per_second$"), "bytes/s"),
    (re.compile(r"requests_per_second$"), "requests/s"),
    (re.compile(r"tokens_per_second$"), "tokens/s"),
    (re.compile(r"_(mean|p50|p95|p99)$"), "ms"),
    (re.compile(r"_ratio$"), "ratio"),
    (re.compile(r"_celsius$"), "celsius"),
    (re.compile(r"_watts$"), "watts"),
)


@dataclass(frozen=True, slots=True)
class HistoryRoutes:
    """Handlers of the routes of the history; without a reader, each says that there is none."""

    reader: HistoryReader | None
    traffic: Traffic
    """The last requests, where there is no history."""
    clock: Clock

    def add_to(self, router: APIRouter) -> None:
        """Register the routes."""
        router.add_api_route("/api/v1/series", self.series, methods=["GET"])
        router.add_api_route("/api/v1/requests", self.requests, methods=["GET"])
        router.add_api_route("/api/v1/energy", self.energy, methods=["GET"])

    async def series(
        self,
        subject: Annotated[str, Query(max_length=300)] = "fleet",
        metric: Annotated[str, Query(max_length=500)] = "",
        from_: Annotated[str, Query(alias="from", max_length=40)] = "1h",
        to: Annotated[str, Query(max_length=40)] = "now",
        step: Annotated[str, Query(max_length=20)] = "",
    ) -> Response:
        """Return figures over time. `subject`: fleet, node/NAME or model/NAME; null where nothing was measured."""
        reader, now_s = self._reader(), self.clock.now().timestamp()
        kind, _, name = subject.partition("/")
        if kind not in COLUMNS or bool(name) == (kind == "fleet"):
            raise invalid(f"'{subject}' is not fleet, node/NAME or model/NAME.", "subject")
        begin_s, end_s = parse_range(from_, to, now_s)
        wanted_s = _seconds(step, "step") if step else (end_s - begin_s) / _DEFAULT_POINTS
        steps = align(begin_s, end_s, wanted_s=wanted_s, now_s=now_s)
        query = _query(kind, name, parse_metrics(metric, kind), steps)
        if query.steps > MOST_POINTS:
            what = f"These are {query.steps} points, more than {MOST_POINTS}; use a longer step."
            raise invalid(what, "step")
        series = await reader.series(query)
        return json_response(
            {
                "subject": subject,
                "from": show_time(query.begin_s),
                "to": show_time(query.end_s),
                "stepSeconds": query.step_s,
                "metrics": {
                    one: {
                        "unit": unit_of(one),
                        "mean": [_rounded(mean) for _, mean, _ in points],
                        "min": [_rounded(least) for least, _, _ in points],
                        "max": [_rounded(most) for _, _, most in points],
                    }
                    for one, points in series.items()
                },
            }
        )

    async def energy(
        self,
        subject: Annotated[str, Query(max_length=3000)],
        from_: Annotated[str, Query(alias="from", max_length=40)] = "1h",
        to: Annotated[str, Query(max_length=40)] = "now",
    ) -> Response:
        """Return joules, and joules for a request and for 1,000 tokens, of node/NAME or model/NAME; several with commas."""
        reader, now_s = self._reader(), self.clock.now().timestamp()
        begin_s, end_s = parse_range(from_, to, now_s)
        subjects = list(dict.fromkeys(filter(None, subject.split(","))))
        if not 0 < len(subjects) <= _MOST_SUBJECTS:
            raise invalid(f"Name 1 to {_MOST_SUBJECTS} subjects, separated by commas.", "subject")
        rows: list[Row] = []
        steps = align(begin_s, end_s, wanted_s=1, now_s=now_s)
        for one in subjects:
            kind, _, name = one.partition("/")
            if kind not in ENERGY_METRICS or not name:
                raise invalid(f"'{one[:200]}' is not node/NAME or model/NAME.", "subject")
            metrics = ENERGY_METRICS[kind]
            query = _query(kind, name, metrics, steps)
            series = await reader.series(query)
            watts, requests, tokens = (series[metric] for metric in metrics)
            rows.append(energy_row(one, watts, requests, tokens, query.step_s))
        head = {"from": show_time(begin_s), "to": show_time(end_s)}
        return json_response({**head, "energy": rows})

    async def requests(  # noqa: PLR0913 - each filter is a parameter of the query
        self,
        from_: Annotated[str, Query(alias="from", max_length=40)] = "24h",
        to: Annotated[str, Query(max_length=40)] = "now",
        limit: Annotated[int, Query(ge=1, le=_MOST_REQUESTS)] = 100,
        status: Annotated[str, Query(max_length=200)] = "",
        model: Annotated[str, Query(max_length=300)] = "",
        node: Annotated[str, Query(max_length=300)] = "",
        key: Annotated[str, Query(max_length=300)] = "",
        gateway: Annotated[str, Query(max_length=300)] = "",
        id_: Annotated[str, Query(alias="id", max_length=300)] = "",
        slower: Annotated[float, Query(ge=0)] = 0.0,
    ) -> Response:
        """Return ended requests, newest first, as gateways journal them. `slower`: at least so many milliseconds."""
        begin_s, end_s = parse_range(from_, to, self.clock.now().timestamp())
        query = RequestQuery(
            begin_s=begin_s,
            end_s=end_s,
            limit=limit,
            outcomes=parse_outcomes(status),
            model=model,
            node=node,
            key=key,
            gateway=gateway,
            id=id_,
            least_ms=slower,
        )
        if self.reader is None:
            matches = filter(query.matches, reversed(self.traffic.ended))
            ended_requests = list(islice(matches, limit))
        else:
            ended_requests = await self.reader.requests(query)
        body = msgspec.json.encode({"requests": ended_requests})
        return Response(body, media_type="application/json")

    def _reader(self) -> HistoryReader:
        if self.reader is None:
            raise no_history()
        return self.reader


def _query(
    kind: str, name: str, metrics: tuple[str, ...], steps: tuple[int, int, int, int]
) -> SeriesQuery:
    begin, end, step_s, tier_s = steps
    times = {"begin_s": begin, "end_s": end, "step_s": step_s, "tier_s": tier_s}
    return SeriesQuery(kind=kind, name=name, metrics=metrics, **times)


def parse_metrics(text: str, kind: str) -> tuple[str, ...]:
    """Return the metrics that a query names, separated by commas.

    Raises:
        RefusedError: one does not exist, or there are none or too many.

    """
    known, metrics = metrics_of(kind), tuple(dict.fromkeys(filter(None, text.split(","))))
    for metric in metrics:
        if metric not in known:
            message = f"A {kind} has no metric '{metric[:60]}'; it has {', '.join(known)}."
            raise invalid(message, "metric")
    if not 0 < len(metrics) <= _MOST_METRICS:
        message = f"Name 1 to {_MOST_METRICS} metrics, separated by commas: {', '.join(known)}."
        raise invalid(message, "metric")
    return metrics


def _seconds(text: str, name: str) -> int:
    try:
        return int(durations.parse(text))
    except ValueError as error:
        raise invalid(f"{error}.", name) from None


def unit_of(metric: str) -> str:
    """Return the unit of a metric; `count` for numbers of things."""
    return next((unit for form, unit in _UNITS if form.search(metric)), "count")


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
