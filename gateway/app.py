"""Everything but the hot path: the list of models, health, metrics, and what is not there.

No request to a model passes through FastAPI; those are answered by `gateway/clients/`.
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
from gateway.access.door import Door, holder_of, may_see
from gateway.admin import log, models
from gateway.admin import routes as admin
from gateway.admin.sight import Sight
from gateway.clients.openai import PATHS
from gateway.errors import Refusal, RefusedError
from gateway.known.fleet import KnownFleet
from gateway.known.keeper import TableKeeper
from gateway.routing.choosing import nearest
from gateway.routing.table import Model
from gateway.surfaces import every
from gateway.surfaces.anthropic import listing as anthropic
from gateway.surfaces.ollama import routes as ollama
from machinery.exposition import CONTENT_TYPE

Json: TypeAlias = dict[str, object]

# A millisecond.
_LINES_AT_ONCE = 200
# For who asks for the address that clients are given.
_V1 = (
    "GET /v1/models",
    *(f"POST {path}" for path in (*PATHS, *every.PATHS) if path.startswith("/v1/")),
)
_NOT_POST = ("GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS")


def make_app(sight: Sight) -> FastAPI:
    """Return the FastAPI application."""
    known = sight.known
    app = FastAPI(title="mlx-fleet gateway", docs_url=None, redoc_url=None, openapi_url=None)
    app.router.redirect_slashes = False
    app.add_middleware(Door, access=known.access, refuse=refuse)
    routes = Routes(sight)
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
    for path in sorted((*PATHS, *every.PATHS)):
        app.add_api_route(path, routes.only_post, methods=list(_NOT_POST))
    ollama.add(app, known.keeper, known.access)
    app.include_router(admin.make_router(sight))
    app.include_router(models.make_router(sight))
    app.include_router(log.make_router(sight.log))
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
    telling = every.telling(scope["path"], scope["headers"])
    if telling is not None:
        status, headers, body = telling.whole(status, headers, body)
    told = {name.decode(): value.decode() for name, value in headers}
    return Response(body, status_code=status, headers=told)


@dataclass(frozen=True, slots=True)
class Routes:
    """One method a route."""

    sight: Sight

    @property
    def known(self) -> KnownFleet:
        return self.sight.known

    @property
    def keeper(self) -> TableKeeper:
        return self.known.keeper

    async def models(self, request: Request) -> Response:
        """List every name that the client may use."""
        if not self.keeper.is_synced:
            raise RefusedError(errors.not_synced())
        models = sorted(self.keeper.table.models.values(), key=lambda model: model.name)
        models = [model for model in models if may_see(request, model.name)]
        if every.VERSION in request.headers:
            return _json(anthropic.page(models, request.query_params))
        return _json({"object": "list", "data": [_listed(model) for model in models]})

    async def model(self, name: str, request: Request) -> Response:
        """Tell of one name."""
        if not self.keeper.is_synced:
            raise RefusedError(errors.not_synced())
        self.known.access.allow(holder_of(request), name)
        table = self.keeper.table
        found = table.models.get(name)
        if found is None:
            near = nearest(table, name)
            raise RefusedError(errors.unknown_model(name, sorted(table.models), near))
        return _json(anthropic.one(found) if every.VERSION in request.headers else _listed(found))

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


def _status(keeper: TableKeeper) -> str:
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


def _listed(model: Model) -> Json:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "mlx-fleet",
    }
