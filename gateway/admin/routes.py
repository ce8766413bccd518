"""`/model/info`: what is known of the models that clients may use. Whoever has a key sees those that it is for.

The admin API's routes: `/api/cluster`, `/api/dashboard`, `/queue`, `/metrics/snapshot`. Only keys for admins may ask.

Nothing here changes the fleet: what runs where is declared (`fleetctl apply`), also for whoever used to press a button.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, TypeAlias

import orjson
from fastapi import APIRouter, Depends, Query, Request, Response

from gateway import errors
from gateway.admin import dashboard
from gateway.admin.admin_context import DAY_S, AdminContext, endpoints_of
from gateway.auth.access_control import can_see, principal_of, require_admin
from gateway.errors import Refusal, RefusedError, invalid
from gateway.metrics.outcomes import OUTCOMES
from gateway.routing.selection import nearest
from gateway.routing.table import ServedModel
from gateway.telemetry import request_journal
from gateway.telemetry.time_series import SERIES_METRICS, STEP_S
from schemas import duration
from schemas.deployment import ModelDeployment

Json: TypeAlias = dict[str, object]


def make_model_router(sight: AdminContext) -> APIRouter:
    """Return the route."""
    router = APIRouter()
    router.add_api_route("/model/info", ModelInfoRoute(sight).info, methods=["GET", "HEAD"])
    return router


@dataclass(frozen=True, slots=True)
class ModelInfoRoute:
    """One method a route."""

    sight: AdminContext

    async def info(self, request: Request, model: str = "") -> Response:
        """Tell of one model, or of all."""
        keeper = self.sight.known.keeper
        if not keeper.is_synced:
            raise RefusedError(errors.not_synced())
        table = keeper.table
        deployments = keeper.known().deployments
        if not model:
            seen = [found for found in table.models.values() if can_see(request, found.name)]
            seen.sort(key=lambda found: found.name)
            return _model_response({"data": [_model_body(found, deployments) for found in seen]})
        self.sight.known.access.allow(principal_of(request), model)
        found = table.models.get(model)
        if found is None:
            near = nearest(table, model)
            raise RefusedError(errors.unknown_model(model, sorted(table.models), near))
        return _model_response(_model_body(found, deployments))


def _model_body(model: ServedModel, deployments: Mapping[str, ModelDeployment]) -> Json:
    names = dict.fromkeys(name for share in model.shares for name in share.deployments)
    found = [deployments.get(name) for name in names]
    specs = [one.spec for one in found if one is not None]
    leased = {target for target, is_leased in endpoints_of(model) if is_leased}
    return {
        "id": model.name,
        "created": model.created,
        "deployments": list(names),
        "source": [spec.model.path for spec in specs],
        # What every one of them can take: a client cannot know which one answers.
        "contextLength": min((spec.context_length for spec in specs), default=None),
        "concurrency": sum(target.concurrency for target in leased),
        "replicasReady": len({target.replica for target in leased}),
        "deviceCount": len({target.node for target in leased}),
    }


def _model_response(body: Json) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")


_MOST_REQUESTS = 1000
# What a graph has room for, in pixels.
_MOST_POINTS = 360


def make_admin_router(sight: AdminContext) -> APIRouter:
    """Return the routes of one gateway."""
    router = APIRouter(dependencies=[Depends(require_admin)])
    admin = AdminRoutes(sight)
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
class AdminRoutes:
    """One method a route."""

    sight: AdminContext

    async def status(self) -> Response:
        """Say how the fleet is."""
        macs = await self.sight.nodes.macs()
        counts = dashboard.count_workers(dashboard.all_workers(self.sight, macs))
        return _json(dashboard.cluster(self.sight, counts, macs))

    async def workers(self) -> Response:
        """List the Macs."""
        found = dashboard.all_workers(self.sight, await self.sight.nodes.macs())
        return _json({"workers": found})

    async def worker(self, name: str) -> Response:
        """Tell of one Mac."""
        found = dashboard.all_workers(self.sight, await self.sight.nodes.macs())
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
        counts = dashboard.count_workers(dashboard.all_workers(self.sight, macs))
        return _json(dashboard.overview(self.sight, counts))

    async def timeseries(
        self, metric: str = "rps", duration: Annotated[str, Query(max_length=20)] = "1h"
    ) -> Response:
        """Return one figure over time; null where there was nothing to measure."""
        if metric not in SERIES_METRICS:
            known = ", ".join(SERIES_METRICS)
            raise invalid(f"There is no metric '{metric[:50]}'; there are {known}.", "metric")
        unit, value = SERIES_METRICS[metric]
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
        return _json(
            {"requests": request_journal.render_entries(found, self.sight.id), "kept": len(kept)}
        )

    async def queue(self) -> Response:
        """Say who waits."""
        return _json(dashboard.queue(self.sight))

    async def snapshot(self) -> Response:
        """Return the figures of a small dashboard at once."""
        return _json(dashboard.snapshot(self.sight))

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
