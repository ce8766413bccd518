"""Routes of the admin API (`/api/cluster`, `/api/dashboard`, `/queue`, `/metrics/snapshot`) and `/model/info`.

`gateway/auth/roles.py` has the role that each route needs; `/model/info` shows each key the models that it may use.
No route changes the fleet: `fleetctl apply` declares what runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import orjson
from fastapi import APIRouter, Query, Request, Response

from gateway import errors
from gateway.admin import dashboard
from gateway.admin.admin_context import AdminContext, endpoints_of
from gateway.admin.query_words import (
    SERIES_UNITS,
    parse_kept_duration,
    parse_outcomes,
    public_status,
    series_metric,
)
from gateway.auth.access_control import can_see, principal_of
from gateway.routing.table import ServedModel
from gateway.telemetry import request_journal
from gateway.telemetry.request_journal import JournalEntry
from gateway.telemetry.time_series import STEP_S
from schemas.deployment import ModelDeployment
from schemas.wire.errors import Refusal, RefusedError

Json: TypeAlias = dict[str, object]
_MOST_REQUESTS = 1000
# The width of a graph in pixels.
_MOST_POINTS = 360


def make_model_router(context: AdminContext) -> APIRouter:
    """Return the router of `/model/info`."""
    router = APIRouter()
    router.add_api_route("/model/info", ModelInfoRoute(context).info, methods=["GET", "HEAD"])
    return router


@dataclass(frozen=True, slots=True)
class ModelInfoRoute:
    """Handler of `/model/info`."""

    context: AdminContext

    async def info(self, request: Request, model: str = "") -> Response:
        """Describe one model, or all."""
        table_cache = self.context.fleet_state.table_cache
        if not table_cache.is_synced:
            raise RefusedError(errors.not_synced())
        table = table_cache.table
        deployments = table_cache.known().deployments
        if not model:
            seen = [found for found in table.models.values() if can_see(request, found.name)]
            seen.sort(key=lambda found: found.name)
            return _model_response({"data": [_model_body(found, deployments) for found in seen]})
        self.context.fleet_state.access.allow(principal_of(request), model)
        found = table.models.get(model)
        if found is None:
            access, principal = self.context.fleet_state.access, principal_of(request)
            raise access.unknown_model(principal, table, model)
        return _model_response(_model_body(found, deployments))


def _model_body(model: ServedModel, deployments: Mapping[str, ModelDeployment]) -> Json:
    names = dict.fromkeys(name for backend in model.backends for name in backend.deployments)
    found = [deployments.get(name) for name in names]
    specs = [one.spec for one in found if one is not None]
    leased = {endpoint for endpoint, is_leased in endpoints_of(model) if is_leased}
    return {
        "id": model.name,
        "created": model.created,
        "deployments": list(names),
        "source": [spec.model.label for spec in specs],
        "contextLength": model.context_length,
        "concurrency": sum(endpoint.concurrency for endpoint in leased),
        "replicasReady": len({endpoint.replica for endpoint in leased}),
        "deviceCount": len({endpoint.node for endpoint in leased}),
    }


def _model_response(body: Json) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")


def make_admin_router(context: AdminContext) -> APIRouter:
    """Return the router of the admin API."""
    router = APIRouter()
    admin = AdminRoutes(context)
    for path, answer in (
        ("/api/cluster/status", admin.status),
        ("/api/cluster/workers", admin.workers),
        ("/api/cluster/workers/{name}", admin.worker),
        ("/api/dashboard/overview", admin.overview),
        ("/api/dashboard/workers", admin.workers),
        ("/api/dashboard/metrics/timeseries", admin.timeseries),
        ("/api/dashboard/requests", admin.requests),
        ("/api/requests/ended", admin.ended),
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
    """Route handlers of the admin API, one method for each route."""

    context: AdminContext

    async def status(self) -> Response:
        """Report the state of the fleet."""
        nodes = await self.context.nodes.nodes()
        counts = dashboard.count_workers(dashboard.all_workers(self.context, nodes))
        return _json(dashboard.cluster(self.context, counts, nodes))

    async def workers(self) -> Response:
        """List the Macs."""
        found = dashboard.all_workers(self.context, await self.context.nodes.nodes())
        return _json(found)

    async def worker(self, name: str) -> Response:
        """Describe one Mac."""
        found = dashboard.all_workers(self.context, await self.context.nodes.nodes())
        for worker in found:
            if worker["workerId"] == name:
                return _json(worker)
        known = ", ".join(str(worker["workerId"]) for worker in found[:20]) or "none"
        raise RefusedError(
            Refusal(
                status=404,
                message=f"No worker is called '{name[:100]}'. There are: {known}.",
                code="worker_not_found",
            )
        )

    async def overview(self) -> Response:
        """Return the summary figures of a dashboard."""
        nodes = await self.context.nodes.nodes()
        counts = dashboard.count_workers(dashboard.all_workers(self.context, nodes))
        return _json(dashboard.overview(self.context, counts))

    async def timeseries(
        self, metric: str = "rps", duration: Annotated[str, Query(max_length=20)] = "1h"
    ) -> Response:
        """Return one figure over time; null where there was nothing to measure."""
        unit, value = series_metric(metric)
        now_s, length_s = self.context.clock.now().timestamp(), parse_kept_duration(duration)
        recorder = self.context.recorder
        points = recorder.series.points(now_s, length_s, _MOST_POINTS)
        seen = ((at_s, sums.since(at_s, recorder.since_s)) for at_s, sums in points)
        return _json(
            {
                "metric": metric,
                "unit": SERIES_UNITS.get(unit, unit),
                "duration": duration,
                "stepSeconds": STEP_S * -(-max(1, length_s // STEP_S) // _MOST_POINTS),
                "points": [
                    {"timestamp": int(at_s * 1000), "value": None if sums is None else value(sums)}
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
        """Return the last requests, newest first. `status`: outcomes, separated by commas."""
        outcomes = parse_outcomes(status)
        journal = self.context.recorder.journal
        found = journal.last(limit, outcomes=outcomes, model=model, node=node)
        return _json([_request(entry) for entry in found])

    async def ended(
        self,
        limit: Annotated[int, Query(ge=1, le=_MOST_REQUESTS)] = 100,
        status: str = "",
        model: str = "",
        node: str = "",
    ) -> Response:
        """Return the last entries of the journal, newest first. `status`: outcomes, separated by commas."""
        outcomes = parse_outcomes(status)
        journal = self.context.recorder.journal
        found = journal.last(limit, outcomes=outcomes, model=model, node=node)
        rows = request_journal.render_entries(found, self.context.id)
        return _json({"requests": request_journal.rows_json(rows), "kept": len(journal)})

    async def queue(self) -> Response:
        """Report the waiting requests."""
        return _json(dashboard.queue(self.context))

    async def snapshot(self) -> Response:
        """Return the figures of a small dashboard at once."""
        return _json(dashboard.snapshot(self.context))

    async def declared(self) -> Response:
        """Refuse to load or unload a model by hand."""
        raise RefusedError(
            Refusal(
                status=501,
                message="Models are not loaded or unloaded by hand here: what runs is declared. Write a "
                "ModelDeployment (spec.replicas, spec.placement) and apply it with `fleetctl apply -f`; "
                "`fleetctl delete modeldeployment/NAME` unloads. The fleet keeps it so, also after a crash.",
                code="declared_not_commanded",
            )
        )


def _request(entry: JournalEntry) -> Json:
    """Return an ended request in the shape of older dashboards."""
    return {
        "requestId": entry.request_id.decode("ascii"),
        "modelId": entry.model,
        "workerId": None if entry.served_by is None else entry.served_by.node,
        "latencyMs": round(entry.whole_s * 1000, 3),
        "tokensGenerated": entry.output_tokens,
        "status": public_status(entry.outcome),
        "timestamp": int(entry.time_s * 1000),
    }


def _json(body: Json | list[Json]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
