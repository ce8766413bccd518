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

from gateway import errors
from gateway.access.door import Door, holder_of, may_see
from gateway.admin import models
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
# Which Anthropic's clients always send, and others never.
_ANTHROPIC = "anthropic-version"
_NOT_POST = ("GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS")


def make_app(sight: Sight) -> FastAPI:
    """Return the FastAPI application."""
    known = sight.known
    app = FastAPI(title="mlx-fleet gateway", docs_url=None, redoc_url=None, openapi_url=None)
    app.router.redirect_slashes = False
    app.add_middleware(Door, access=known.access, refuse=refuse)
    routes = Routes(sight)
    app.add_api_route("/v1/models", routes.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", routes.model, methods=["GET"])
    app.add_api_route("/health", routes.health, methods=["GET"])
    app.add_api_route("/metrics", routes.metrics_text, methods=["GET"])
    app.add_api_route("/metrics/demand", routes.demand_text, methods=["GET"])
    # Only so that another method than POST is told so; clients/protocol.py takes the POSTs.
    for path in sorted((*PATHS, *every.PATHS)):
        app.add_api_route(path, routes.only_post, methods=list(_NOT_POST))
    ollama.add(app, known.keeper)
    app.include_router(admin.make_router(sight))
    app.include_router(models.make_router(sight))
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RefusedError, on_refused)
    app.add_exception_handler(RequestValidationError, on_wrong_query)
    return app


async def on_http_error(request: Request, error: Exception) -> Response:
    """Answer a wrong path or method."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    response = refuse(Refusal(status=error.status_code, message=message))
    response.headers.update(error.headers or {})
    return response


async def on_refused(_: Request, error: Exception) -> Response:
    """Answer what a route, or what it depends on, refuses."""
    assert isinstance(error, RefusedError)
    return refuse(error.refusal)


async def on_wrong_query(_: Request, error: Exception) -> Response:
    """Answer a query whose values are none that the route takes."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return refuse(Refusal(status=400, message=f"'{name}': {first['msg']}.", param=name))


def refuse(refusal: Refusal) -> Response:
    """Return a refusal as a response."""
    headers = {name.decode(): value.decode() for name, value in refusal.headers()}
    return Response(refusal.body(), status_code=refusal.status, headers=headers)


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
            return refuse(errors.not_synced())
        models = sorted(self.keeper.table.models.values(), key=lambda model: model.name)
        models = [model for model in models if may_see(request, model.name)]
        if _ANTHROPIC in request.headers:
            return _json(anthropic.page(models, request.query_params))
        return _json({"object": "list", "data": [_listed(model) for model in models]})

    async def model(self, name: str, request: Request) -> Response:
        """Tell of one name."""
        if not self.keeper.is_synced:
            return refuse(errors.not_synced())
        self.known.access.allow(holder_of(request), name)
        table = self.keeper.table
        found = table.models.get(name)
        if found is None:
            return refuse(errors.unknown_model(name, sorted(table.models), nearest(table, name)))
        return _json(anthropic.one(found) if _ANTHROPIC in request.headers else _listed(found))

    async def health(self) -> Response:
        """Say how the gateway is; 200 as soon as it has ever heard from the store."""
        keeper = self.keeper
        staleness_s, age_s = keeper.staleness_s(), self.known.snapshot_age_s()
        body: Json = {
            "status": "ok" if keeper.is_synced else "not synced: etcd was not reached yet",
            "source": keeper.source,
            "storeStalenessSeconds": None if staleness_s is None else round(staleness_s, 3),
            "isStale": keeper.is_stale,
            "snapshotAgeSeconds": None if age_s is None else round(age_s, 1),
            "endpoints": keeper.table.endpoints,
            "models": {
                name: {"ready": model.ready()}
                for name, model in sorted(keeper.table.models.items())
            },
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


def _json(body: Json, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status_code=status, media_type="application/json")


def _listed(model: Model) -> Json:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "mlx-fleet",
    }
