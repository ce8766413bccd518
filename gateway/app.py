"""Everything but the hot path: the list of models, health, metrics, and what is not there.

No request to a model passes through FastAPI; those are answered by `gateway/clients/`.
"""

from dataclasses import dataclass
from typing import TypeAlias

import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from gateway import errors
from gateway.clients.openai import PATHS
from gateway.errors import Refusal
from gateway.known.keeper import TableKeeper
from gateway.routing.choosing import nearest
from gateway.routing.table import Model
from gateway.watch.metrics import Metrics
from machinery.exposition import CONTENT_TYPE

Json: TypeAlias = dict[str, object]


def make_app(keeper: TableKeeper, metrics: Metrics, id_: str) -> FastAPI:
    """Return the FastAPI application."""
    app = FastAPI(title="mlx-fleet gateway", docs_url=None, redoc_url=None, openapi_url=None)
    app.router.redirect_slashes = False
    routes = Routes(keeper, metrics, id_)
    app.add_api_route("/v1/models", routes.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", routes.model, methods=["GET"])
    app.add_api_route("/health", routes.health, methods=["GET"])
    app.add_api_route("/metrics", routes.metrics_text, methods=["GET"])
    app.add_api_route("/metrics/demand", routes.demand_text, methods=["GET"])
    # Only so that another method than POST is told so; clients/protocol.py takes the POSTs.
    for path in sorted(PATHS):
        app.add_api_route(path, routes.only_post, methods=["GET", "PUT", "PATCH", "DELETE"])
    app.add_exception_handler(HTTPException, on_http_error)
    return app


async def on_http_error(request: Request, error: Exception) -> Response:
    """Answer a wrong path or method."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    response = refuse(Refusal(status=error.status_code, message=message))
    response.headers.update(error.headers or {})
    return response


def refuse(refusal: Refusal) -> Response:
    """Return a refusal as a response."""
    headers = {name.decode(): value.decode() for name, value in refusal.headers()}
    return Response(refusal.body(), status_code=refusal.status, headers=headers)


@dataclass(frozen=True, slots=True)
class Routes:
    """One method a route."""

    keeper: TableKeeper
    metrics: Metrics
    id: str

    async def models(self) -> Response:
        """List every name that clients may use."""
        if not self.keeper.is_synced:
            return refuse(errors.not_synced())
        models = sorted(self.keeper.table.models.values(), key=lambda model: model.name)
        return _json({"object": "list", "data": [_listed(model) for model in models]})

    async def model(self, name: str) -> Response:
        """Tell of one name."""
        if not self.keeper.is_synced:
            return refuse(errors.not_synced())
        table = self.keeper.table
        found = table.models.get(name)
        if found is None:
            return refuse(errors.unknown_model(name, sorted(table.models), nearest(table, name)))
        return _json(_listed(found))

    async def health(self) -> Response:
        """Say how the gateway is; 200 as soon as it has ever heard from the store."""
        keeper = self.keeper
        staleness_s = keeper.staleness_s()
        body: Json = {
            "status": "ok" if keeper.is_synced else "not synced: etcd was not reached yet",
            "storeStalenessSeconds": None if staleness_s is None else round(staleness_s, 3),
            "endpoints": keeper.table.endpoints,
            "models": {
                name: {"ready": model.ready()}
                for name, model in sorted(keeper.table.models.items())
            },
        }
        return _json(body, 200 if keeper.is_synced else 503)

    async def metrics_text(self) -> Response:
        """Return the metrics for Prometheus."""
        return Response(self.metrics.text(), media_type=CONTENT_TYPE)

    async def demand_text(self) -> Response:
        """Return the part of it that the reconciler reads."""
        # With it the reconciler tells us from another gateway that goes by the same address.
        headers = {"x-fleet-gateway": self.id}
        return Response(self.metrics.demand_text(), media_type=CONTENT_TYPE, headers=headers)

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
