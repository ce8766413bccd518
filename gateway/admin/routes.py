"""Routes `/model/info`, which shows each key the models that it may use, and `/api/requests/ended`.

`gateway/auth/roles.py` has the role that each route needs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import orjson
from fastapi import APIRouter, Query, Request, Response

from gateway import errors
from gateway.admin.admin_context import AdminContext, endpoints_of
from gateway.auth.access_control import can_see, principal_of
from gateway.routing.table import ServedModel
from gateway.telemetry import request_journal
from schemas.deployment import ModelDeployment
from schemas.wire.errors import RefusedError
from schemas.wire.metrics import parse_outcomes

Json: TypeAlias = dict[str, object]
_MOST_REQUESTS = 1000


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
            models = [
                served_model
                for served_model in table.models.values()
                if can_see(request, served_model.name)
            ]
            models.sort(key=lambda found: found.name)
            return _json_response(
                {"data": [_model_body(served_model, deployments) for served_model in models]}
            )
        self.context.fleet_state.access.allow(principal_of(request), model)
        found = table.models.get(model)
        if found is None:
            access, principal = self.context.fleet_state.access, principal_of(request)
            raise access.unknown_model(principal, table, model)
        return _json_response(_model_body(found, deployments))


def _model_body(model: ServedModel, deployments: Mapping[str, ModelDeployment]) -> Json:
    names = dict.fromkeys(name for backend in model.backends for name in backend.deployments)
    model_deployments = [deployments.get(name) for name in names]
    specs = [deployment.spec for deployment in model_deployments if deployment is not None]
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


def _json_response(body: Json) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")


def make_admin_router(context: AdminContext) -> APIRouter:
    """Return the router of `/model/info` and of the requests that ended."""
    router = APIRouter()
    for path, answer in (
        ("/model/info", ModelInfoRoute(context).info),
        ("/api/requests/ended", EndedRoute(context).ended),
    ):
        router.add_api_route(path, answer, methods=["GET", "HEAD"])
    return router


@dataclass(frozen=True, slots=True)
class EndedRoute:
    """Handler of `/api/requests/ended`."""

    context: AdminContext

    async def ended(
        self,
        limit: Annotated[int, Query(ge=1, le=_MOST_REQUESTS)] = 100,
        status: str = "",
        model: str = "",
        node: str = "",
        id: str = "",  # noqa: A002 - the name of the query's parameter
    ) -> Response:
        """Return the last entries of the journal, newest first. `status`: outcomes, separated by commas; `id`: of a request."""
        outcomes = parse_outcomes(status)
        journal = self.context.recorder.journal
        entries = journal.last(limit, outcomes=outcomes, model=model, node=node, id_=id)
        rows = request_journal.render_entries(entries, self.context.id)
        return _json_response({"requests": request_journal.rows_json(rows), "kept": len(journal)})
