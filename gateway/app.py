"""Everything but the hot path: the list of models, health, metrics, and what is not there.

No request to a model passes through FastAPI; those are answered by `gateway/http/`.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Scope

from gateway import errors
from gateway.admin import gateway_log
from gateway.admin import routes as admin
from gateway.admin import routes as admin_routes
from gateway.admin.admin_context import AdminContext
from gateway.apis import registry
from gateway.apis.anthropic import response_translator as anthropic
from gateway.apis.ollama import routes as ollama
from gateway.apis.openai import PATHS
from gateway.auth.access_control import AuthMiddleware, can_see, principal_of
from gateway.errors import Refusal, RefusedError
from gateway.routing.selection import nearest
from gateway.routing.table import ServedModel
from gateway.state.fleet_state import FleetState
from gateway.state.table_cache import TableCache
from machinery.prometheus import CONTENT_TYPE

Json: TypeAlias = dict[str, object]

# A millisecond.
_LINES_AT_ONCE = 200
# For who asks for the address that clients are given.
_V1 = (
    "GET /v1/models",
    *(f"POST {path}" for path in (*PATHS, *registry.PATHS) if path.startswith("/v1/")),
)
_NOT_POST = ("GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS")


def make_app(sight: AdminContext) -> FastAPI:
    """Return the FastAPI application."""
    known = sight.known
    app = FastAPI(title="mlx-fleet gateway", docs_url=None, redoc_url=None, openapi_url=None)
    app.router.redirect_slashes = False
    app.add_middleware(AuthMiddleware, access=known.access, refuse=refuse)
    routes = AppRoutes(sight)
    for path, answer in (
        ("/v1/models", routes.models),
        ("/v1/models/", routes.models),
        ("/v1/models/{name:path}", routes.model),
        ("/health", routes.health),
        ("/metrics", routes.metrics_text),
        ("/metrics/demand", routes.demand_text),
    ):
        app.add_api_route(path, answer, methods=["GET", "HEAD"])
    # Only so that another method than POST is told so; clients/protocol.py takes the POSTs.
    for path in sorted((*PATHS, *registry.PATHS)):
        app.add_api_route(path, routes.only_post, methods=list(_NOT_POST))
    ollama.add_routes(app, known.keeper, known.access)
    app.include_router(admin.make_admin_router(sight))
    app.include_router(admin_routes.make_model_router(sight))
    app.include_router(gateway_log.make_log_router(sight.log))
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RefusedError, on_refused)
    app.add_exception_handler(RequestValidationError, on_wrong_query)
    return app


async def on_http_error(request: Request, error: Exception) -> Response:
    """Answer a wrong path or method."""
    assert isinstance(error, HTTPException)
    more = {name.lower(): value for name, value in (error.headers or {}).items()}
    allowed = f"; use {more['allow']}" if "allow" in more else ""
    here = f"; below it there are: {', '.join(_V1)}" if request.url.path in ("/v1", "/v1/") else ""
    message = f"{error.detail}: {request.method} {request.url.path}{allowed}{here}"
    response = refuse(request.scope, Refusal(status=error.status_code, message=message))
    response.headers.update(more)
    return response


async def on_refused(request: Request, error: Exception) -> Response:
    """Answer what a route, or what it depends on, refuses."""
    assert isinstance(error, RefusedError)
    return refuse(request.scope, error.refusal)


async def on_wrong_query(request: Request, error: Exception) -> Response:
    """Answer a query whose values are none that the route takes."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    refusal = Refusal(status=400, message=f"'{name}': {first['msg']}.", param=name)
    return refuse(request.scope, refusal)


def refuse(scope: Scope, refusal: Refusal) -> Response:
    """Return a refusal as a response, in the words of the API that was asked."""
    status, headers, body = refusal.status, refusal.headers(), refusal.body()
    telling = registry.error_translator(scope["path"], scope["headers"])
    if telling is not None:
        status, headers, body = telling.whole(status, headers, body)
    told = {name.decode(): value.decode() for name, value in headers}
    return Response(body, status_code=status, headers=told)


@dataclass(frozen=True, slots=True)
class AppRoutes:
    """One method a route."""

    sight: AdminContext

    @property
    def known(self) -> FleetState:
        return self.sight.known

    @property
    def keeper(self) -> TableCache:
        return self.known.keeper

    async def models(self, request: Request) -> Response:
        """List every name that the client may use."""
        if not self.keeper.is_synced:
            raise RefusedError(errors.not_synced())
        models = sorted(self.keeper.table.models.values(), key=lambda model: model.name)
        models = [model for model in models if can_see(request, model.name)]
        if registry.VERSION in request.headers:
            return _json(anthropic.model_page(models, request.query_params))
        return _json({"object": "list", "data": [_model_body(model) for model in models]})

    async def model(self, name: str, request: Request) -> Response:
        """Tell of one name."""
        if not self.keeper.is_synced:
            raise RefusedError(errors.not_synced())
        self.known.access.allow(principal_of(request), name)
        table = self.keeper.table
        found = table.models.get(name)
        if found is None:
            near = nearest(table, name)
            raise RefusedError(errors.unknown_model(name, sorted(table.models), near))
        return _json(
            anthropic.model_body(found)
            if registry.VERSION in request.headers
            else _model_body(found)
        )

    async def health(self, request: Request) -> Response:
        """Say how the gateway is; 200 as soon as it has ever heard from the store.

        No key is asked for, so that names are told only to who shows an admin's, or where nobody needs one.
        """
        keeper = self.keeper
        staleness_s, age_s = keeper.staleness_s(), self.known.snapshot_age_s()
        body: Json = {
            "status": _status(keeper),
            "source": keeper.source,
            "storeStalenessSeconds": None if staleness_s is None else round(staleness_s, 3),
            "isStale": keeper.is_stale,
            "snapshotAgeSeconds": None if age_s is None else round(age_s, 1),
            "endpoints": keeper.table.endpoints,
            "endpointsKept": keeper.table.kept,
        }
        models = sorted(keeper.table.models.items())
        ready = {name: model.ready() for name, model in models}
        body["modelsKnown"] = len(ready)
        body["modelsReady"] = sum(count > 0 for count in ready.values())
        if self.known.access.sees_all(request.scope["headers"]):
            body["models"] = {
                name: {"ready": ready[name], "kept": model.kept()} for name, model in models
            }
        return _json(body, 200 if keeper.is_synced else 503)

    async def metrics_text(self) -> Response:
        """Return the metrics for Prometheus."""
        return StreamingResponse(self._metrics(), media_type=CONTENT_TYPE)

    async def _metrics(self) -> AsyncIterator[str]:
        """Yield them in pieces: a thousand replicas are megabytes, and requests go on in between."""
        lines = self.sight.recorder.metrics.lines()
        while piece := list(islice(lines, _LINES_AT_ONCE)):
            yield "\n".join(piece) + "\n"
            await self.sight.clock.sleep(0)

    async def demand_text(self) -> Response:
        """Return the part of it that the reconciler reads."""
        # With it the reconciler tells us from another gateway that goes by the same address.
        headers = {"x-fleet-gateway": self.sight.id}
        text = self.sight.recorder.metrics.demand_text()
        return Response(text, media_type=CONTENT_TYPE, headers=headers)

    async def only_post(self) -> Response:
        """Refuse what is not a POST."""
        raise HTTPException(405, headers={"allow": "POST"})


def _status(keeper: TableCache) -> str:
    """Return how the gateway is, in words that begin with one word."""
    if not keeper.is_synced:
        return "not synced: etcd was not reached yet"
    if keeper.source == "snapshot":
        return "degraded: etcd was not reached since the start; going by what was kept of it"
    if keeper.is_stale:
        return "degraded: etcd is not heard; going by what it said last"
    return "ok"


def _json(body: Json, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status_code=status, media_type="application/json")


def _model_body(model: ServedModel) -> Json:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "mlx-fleet",
    }
