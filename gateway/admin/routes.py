"""The admin API's routes: `/api/cluster`, `/api/dashboard`, `/queue`, `/metrics/snapshot`. Only keys for admins may ask.

Nothing here changes the fleet: what runs where is declared (`fleetctl apply`), also for whoever used to press a button.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, TypeAlias

import orjson
from fastapi import APIRouter, Depends, Query, Response

from gateway.access.door import admin_only
from gateway.admin import figures, workers
from gateway.admin.sight import DAY_S, Sight
from gateway.errors import Refusal, RefusedError, invalid
from gateway.record import journal
from gateway.record.series import METRICS, STEP_S
from gateway.watch.outcomes import OUTCOMES
from schemas import duration

Json: TypeAlias = dict[str, object]

_MOST_REQUESTS = 1000
# What a graph has room for, in pixels.
_MOST_POINTS = 360


def make_router(sight: Sight) -> APIRouter:
    """Return the routes of one gateway."""
    router = APIRouter(dependencies=[Depends(admin_only)])
    admin = Admin(sight)
    for path, answer in (
        ("/api/cluster/status", admin.status),
        ("/api/cluster/workers", admin.workers),
        ("/api/cluster/workers/{name}", admin.worker),
        ("/api/dashboard/overview", admin.overview),
        ("/api/dashboard/workers", admin.workers),
        ("/api/dashboard/metrics/timeseries", admin.timeseries),
        ("/api/dashboard/requests", admin.requests),
        ("/queue", admin.queue),
        ("/metrics/snapshot", admin.snapshot),
    ):
        router.add_api_route(path, answer, methods=["GET", "HEAD"])
    for path in (
        "/api/cluster/load-model",
        "/api/cluster/unload-model",
        "/api/cluster/workers/{name}/load-model",
        "/api/cluster/workers/{name}/unload-model",
    ):
        router.add_api_route(path, admin.declared, methods=["POST"])
    return router


@dataclass(frozen=True, slots=True)
class Admin:
    """One method a route."""

    sight: Sight

    async def status(self) -> Response:
        """Say how the fleet is."""
        macs = await self.sight.nodes.macs()
        counts = workers.counted(figures.all_workers(self.sight, macs))
        return _json(figures.cluster(self.sight, counts, macs))

    async def workers(self) -> Response:
        """List the Macs."""
        found = figures.all_workers(self.sight, await self.sight.nodes.macs())
        return _json({"workers": found})

    async def worker(self, name: str) -> Response:
        """Tell of one Mac."""
        found = figures.all_workers(self.sight, await self.sight.nodes.macs())
        for worker in found:
            if worker["id"] == name:
                return _json(worker)
        known = ", ".join(str(worker["id"]) for worker in found[:20]) or "none"
        raise RefusedError(
            Refusal(
                status=404,
                message=f"No worker is called '{name[:100]}'. There are: {known}.",
                code="worker_not_found",
            )
        )

    async def overview(self) -> Response:
        """Return the cards of a dashboard."""
        macs = await self.sight.nodes.macs()
        counts = workers.counted(figures.all_workers(self.sight, macs))
        return _json(figures.overview(self.sight, counts))

    async def timeseries(
        self, metric: str = "rps", duration: Annotated[str, Query(max_length=20)] = "1h"
    ) -> Response:
        """Return one figure over time; null where there was nothing to measure."""
        if metric not in METRICS:
            known = ", ".join(METRICS)
            raise invalid(f"There is no metric '{metric[:50]}'; there are {known}.", "metric")
        unit, value = METRICS[metric]
        now_s, length_s = self.sight.clock.now().timestamp(), _seconds(duration)
        recorder = self.sight.recorder
        points = recorder.series.points(now_s, length_s, _MOST_POINTS)
        seen = ((at_s, sums.since(at_s, recorder.since_s)) for at_s, sums in points)
        return _json(
            {
                "metric": metric,
                "unit": unit,
                "duration": duration,
                "stepSeconds": STEP_S * -(-max(1, length_s // STEP_S) // _MOST_POINTS),
                "points": [
                    {"time": _time(at_s), "value": None if sums is None else value(sums)}
                    for at_s, sums in seen
                ],
            }
        )

    async def requests(
        self,
        limit: Annotated[int, Query(ge=1, le=_MOST_REQUESTS)] = 100,
        status: str = "",
        model: str = "",
        node: str = "",
    ) -> Response:
        """Return the last requests, the newest first; `status` is how they ended, several with commas."""
        outcomes = frozenset(filter(None, status.split(",")))
        if strange := sorted(outcomes.difference(OUTCOMES)):
            known = ", ".join(OUTCOMES)
            raise invalid(f"No request ends as '{strange[0][:50]}'; they end as {known}.", "status")
        kept = self.sight.recorder.journal
        found = kept.last(limit, outcomes=outcomes, model=model, node=node)
        return _json({"requests": journal.shown(found, self.sight.id), "kept": len(kept)})

    async def queue(self) -> Response:
        """Say who waits."""
        return _json(figures.queue(self.sight))

    async def snapshot(self) -> Response:
        """Return the figures of a small dashboard at once."""
        return _json(figures.snapshot(self.sight))

    async def declared(self) -> Response:
        """Refuse to do by hand what is declared."""
        raise RefusedError(
            Refusal(
                status=501,
                message="Models are not loaded or unloaded by hand here: what runs is declared. Write a "
                "ModelDeployment (spec.replicas, spec.placement) and apply it with `fleetctl apply -f`; "
                "`fleetctl delete modeldeployment/NAME` unloads. The fleet keeps it so, also after a crash.",
                code="declared_not_commanded",
            )
        )


def _seconds(text: str) -> int:
    try:
        seconds = duration.parse(text)
    except ValueError as error:
        raise invalid(f"{error}.", "duration") from None
    if not STEP_S <= seconds <= DAY_S:
        raise invalid(
            f"'{text}' is not between {STEP_S}s and 24h, which is what is kept.", "duration"
        )
    return seconds


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).isoformat(timespec="seconds")


def _json(body: Json) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
