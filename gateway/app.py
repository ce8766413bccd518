"""FastAPI application for everything but requests to models: the list of models, health, metrics and the admin API.

Requests to models never reach FastAPI; `gateway/http/protocol.py` takes them.
"""

import difflib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import TypeAlias

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Scope

from compat import names
from compat import routes as compat
from gateway import errors
from gateway.admin import openapi_routes
from gateway.admin.admin_context import AdminContext, endpoints_of
from gateway.admin.fleet_facts import GatewayFacts
from gateway.admin.in_flight import InFlightSource, endpoint_of
from gateway.admin.model_facts import read_facts
from gateway.admin.routes import make_admin_router
from gateway.apis import registry
from gateway.apis.anthropic import response_translator as anthropic
from gateway.apis.http_bodies import json_response
from gateway.apis.local_servers import LocalServerRoutes
from gateway.apis.model_loads import ModelLoads
from gateway.apis.ollama import routes as ollama
from gateway.apis.openai import PATHS
from gateway.auth.access_control import AuthMiddleware, principal_of
from gateway.auth.roles import check_role
from gateway.batches.database import BatchStore
from gateway.batches.routes import BatchRoutes
from gateway.http.request_context import RequestContext
from gateway.metrics.vllm_metrics import vllm_families
from gateway.responses.routes import ResponseRoutes
from gateway.responses.stateful import StatefulResponses
from gateway.routing.table import ServedModel
from gateway.state.fleet_state import FleetState
from gateway.state.table_cache import TableCache
from machinery.prometheus import CONTENT_TYPE
from machinery.version import version
from schemas.wire import headers as wire_headers
from schemas.wire import vllm_metrics
from schemas.wire.errors import Refusal, RefusedError
from schemas.wire.health import StoreView

Json: TypeAlias = dict[str, object]

# Rendering this many lines takes about a millisecond.
_LINES_AT_ONCE = 200
# Endpoints that the answer to GET /v1 lists.
_V1 = (
    "GET /v1/models",
    *(f"POST {path}" for path in (*PATHS, *registry.PATHS) if path.startswith("/v1/")),
    *("POST /v1/files", "POST /v1/batches"),
)
# The same for paths below /api.
_OLLAMAS = (
    *("GET /api/tags", "GET /api/ps", "GET /api/version", "POST /api/show"),
    *(f"POST {path}" for path in registry.PATHS if path.startswith("/api/")),
)
_LINKS: Json = {
    "models": "/v1/models",
    "chat": "/v1/chat/completions",
    "health": "/health",
    "live": "/health/live",
    "ready": "/health/ready",
    "metrics": "/metrics",
}
# Longer paths are cut off in messages; the search for a similar one is quadratic in the length.
_LONGEST_PATH = 200
_NOT_POST = ("GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS")


def make_app(
    context: AdminContext,
    requests: InFlightSource | None = None,
    batch_store: BatchStore | None = None,
    responses: StatefulResponses | None = None,
    *,
    has_compat_names: bool = False,
) -> FastAPI:
    """Return the FastAPI application.

    `requests` are the requests to models that are under way. `has_compat_names`: names of mlx-serving are used, too.
    """
    requests = requests or InFlightSource()
    fleet_state = context.fleet_state
    app = FastAPI(
        title="mlx-fleet gateway",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        dependencies=[Depends(check_role)],
    )
    app.router.redirect_slashes = False
    app.add_middleware(AuthMiddleware, access=fleet_state.access, refuse=refuse)
    facts = GatewayFacts(context)
    routes = AppRoutes(context, requests.running, facts if has_compat_names else None)
    for path, answer in (
        ("/", routes.root),
        ("/v1/models", routes.models),
        ("/v1/models/{name:path}", routes.model),
        ("/health", routes.health),
        ("/health/live", routes.live),
        ("/health/ready", routes.ready),
        ("/metrics", routes.metrics_text),
        ("/metrics/demand", routes.demand_text),
        (vllm_metrics.PATH, routes.vllm_text),
    ):
        app.add_api_route(path, answer, methods=["GET", "HEAD"])
    # Registered only to answer other methods with 405; http/protocol.py takes POST before it gets
    # here.
    for path in sorted((*PATHS, *registry.PATHS)):
        app.add_api_route(path, routes.only_post, methods=list(_NOT_POST))
    loads = ModelLoads(
        fleet_state=fleet_state,
        activator=context.activator,
        on_demand=context.on_demand,
        clock=context.clock,
    )
    ollama.OllamaRoutes(loads=loads, facts=partial(read_facts, context)).add_to(app)
    LocalServerRoutes(loads=loads).add_to(app)
    BatchRoutes(store=batch_store, clock=context.clock).add_to(app)
    responses = responses or StatefulResponses(None, context.clock)
    ResponseRoutes(responses).add_to(app)
    app.include_router(compat.make_router(facts))
    app.include_router(make_admin_router(context, requests))
    app.add_api_route("/openapi.json", openapi_routes.openapi, methods=["GET"])
    app.add_api_route("/docs", openapi_routes.docs, methods=["GET"])
    app.add_exception_handler(HTTPException, on_http_error)
    rename = names.rename if has_compat_names else None
    app.add_exception_handler(RefusedError, partial(on_refused, rename=rename))
    app.add_exception_handler(RequestValidationError, on_wrong_query)
    return app


async def on_http_error(request: Request, error: Exception) -> Response:
    """Answer a request with an unknown path or a wrong method."""
    assert isinstance(error, HTTPException)
    more = {name.lower(): value for name, value in (error.headers or {}).items()}
    path = request.url.path[:_LONGEST_PATH]
    if error.status_code == 405 and request.method == "OPTIONS":
        return Response(status_code=204, headers={"allow": f"{more.get('allow', '')}, OPTIONS"})
    message = f"{error.detail}: {request.method} {path}"
    if "allow" in more:
        message += f"; use {more['allow']}"
    elif path == "/v1":
        message += f"; below it there are: {', '.join(_V1)}"
    elif error.status_code == 404:
        message += f".{_nearest_path(path)} There are: {', '.join(_OLLAMAS if path.startswith('/api/') else _V1)}."
    response = refuse(request.scope, Refusal(status=error.status_code, message=message))
    response.headers.update(more)
    return response


def _nearest_path(path: str) -> str:
    """Return the question whether a similar path was meant; empty if none is similar."""
    known = {one.partition(" ")[2]: one for one in (*_V1, *_OLLAMAS)}
    # Clients that are given the address without /v1, or with it twice, ask for such paths.
    wanted = "/v1/" + path.removeprefix("/").removeprefix("v1/").removeprefix("v1/")
    near = known.get(wanted) or next(
        (known[match_] for match_ in difflib.get_close_matches(path, known, n=1)), None
    )
    return "" if near is None else f" Did you mean {near}?"


async def on_refused(
    request: Request, error: Exception, rename: Callable[[Refusal], Refusal] | None = None
) -> Response:
    """Answer a request that a route or one of its dependencies refused."""
    assert isinstance(error, RefusedError)
    return refuse(request.scope, error.refusal if rename is None else rename(error.refusal))


async def on_wrong_query(request: Request, error: Exception) -> Response:
    """Answer a request whose query parameters are invalid."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    refusal = Refusal(status=400, message=f"'{name}': {first['msg']}.", param=name)
    return refuse(request.scope, refusal)


def refuse(scope: Scope, refusal: Refusal) -> Response:
    """Return a refusal as a response in the format of the API that the path belongs to."""
    status, headers, body = refusal.status, refusal.headers(), refusal.body()
    translator = registry.error_translator(scope["path"], scope["headers"])
    if translator is not None:
        status, headers, body = translator.whole(status, headers, body)
    fields = {name.decode(): value.decode() for name, value in headers}
    return Response(body, status_code=status, headers=fields)


@dataclass(frozen=True, slots=True)
class AppRoutes:
    """Route handlers of the application, one method for each route."""

    context: AdminContext
    running: Callable[[], Iterable[RequestContext]] = tuple
    """Returns the requests to models that are under way."""
    compat_facts: GatewayFacts | None = None
    """Facts for the names of mlx-serving; None: they are not used."""

    @property
    def fleet_state(self) -> FleetState:
        return self.context.fleet_state

    @property
    def table_cache(self) -> TableCache:
        return self.fleet_state.table_cache

    async def root(self, request: Request) -> Response:
        """Describe the gateway: name, version, models and the paths to go on with.

        The route needs no key. Model names are shown only to keys with the role viewer, or where keys are not
        required. Ollama's clients get its own text.
        """
        if ollama.is_ollama_client(request):
            return ollama.root_response()
        body: Json = {
            "name": "mlx-fleet",
            "version": version(),
            "status": _status(self.table_cache),
        }
        if self.fleet_state.access.sees_all(request.scope["headers"]):
            body["models"] = sorted(self.table_cache.table.models)
        return json_response({**body, "links": _LINKS})

    async def live(self) -> Response:
        """Answer 200 as long as the process serves requests."""
        return json_response({"status": "alive"})

    async def ready(self) -> Response:
        """Answer 200 once the gateway has a routing table, else 503; for load balancers, which have no key."""
        status = 200 if self.table_cache.is_synced else 503
        return json_response({"status": _status(self.table_cache)}, status)

    async def models(self, request: Request) -> Response:
        """List the models that the client may use."""
        models = self.fleet_state.visible_models(principal_of(request))
        if registry.VERSION in request.headers:
            return json_response(anthropic.model_page(models, request.query_params))
        return json_response({"object": "list", "data": [_model_body(model) for model in models]})

    async def model(self, name: str, request: Request) -> Response:
        """Describe one model."""
        served_model = self.fleet_state.find_model(principal_of(request), name)
        return json_response(
            anthropic.model_body(served_model)
            if registry.VERSION in request.headers
            else _model_body(served_model)
        )

    async def health(self, request: Request) -> Response:
        """Report the health of the gateway; 200 once the gateway has a routing table.

        The route needs no key. Other machines are told the status alone, unless they may read
        metrics. Model names are shown only to keys with the role viewer, or where keys are not
        required.
        """
        table_cache = self.table_cache
        status = 200 if table_cache.is_synced else 503
        phrase = _status(table_cache)
        if self.compat_facts is not None:
            phrase = names.health_phrase(phrase)
        sees_all = self.fleet_state.access.sees_all(request.scope["headers"])
        if not sees_all and await self.context.metrics_access.denial(request.scope) is not None:
            # Load balancers have no credentials.
            return json_response({"status": phrase}, status)
        staleness_s, age_s = table_cache.staleness_s(), self.fleet_state.snapshot_age_s()
        body: Json = {
            "status": phrase,
            "source": table_cache.source,
            **StoreView(staleness_s, table_cache.refusal).fields(),
            "isStale": table_cache.is_stale,
            "snapshotAgeSeconds": None if age_s is None else round(age_s, 1),
            "endpoints": table_cache.table.endpoints,
            "endpointsKept": table_cache.table.kept,
            "endpointsRefused": table_cache.table.refused,
        }
        models = sorted(table_cache.table.models.items())
        ready = {name: model.ready() for name, model in models}
        body["modelsKnown"] = len(ready)
        body["modelsReady"] = sum(count > 0 for count in ready.values())
        if sees_all:
            body["models"] = {
                name: {"ready": ready[name], "kept": model.kept()} for name, model in models
            }
        if self.compat_facts is not None:
            workers = await self.compat_facts.workers()
            body |= names.health(self.compat_facts, workers, self.context.id, has_models=sees_all)
        return json_response(body, status)

    async def metrics_text(self, request: Request) -> Response:
        """Return the metrics in Prometheus text format."""
        await self._check_reader(request)
        lines = self.context.recorder.metrics.lines()
        if self.compat_facts is not None:
            lines = chain(lines, names.metric_lines(await self.compat_facts.workers()))
        return StreamingResponse(self._pieces(lines), media_type=CONTENT_TYPE)

    async def vllm_text(self, request: Request) -> Response:
        """Return the metrics under the names of vLLM, summed by model."""
        await self._check_reader(request)
        running: list[str] = []
        waiting: list[str] = []
        for one in self.running():
            (waiting if endpoint_of(one) is None else running).append(one.model)
        tracker = self.context.load_tracker
        used = {
            name: tracker.kv_used({one.origin for one, _ in endpoints_of(model)})
            for name, model in self.table_cache.table.models.items()
        }
        families = vllm_families(self.context.recorder.metrics, running, waiting, used)
        lines = (line for family in families for line in family.lines())
        return StreamingResponse(self._pieces(lines), media_type=CONTENT_TYPE)

    async def _pieces(self, lines: Iterator[str]) -> AsyncIterator[str]:
        """Yield metrics in pieces. A thousand replicas make megabytes, and requests are served in between."""
        while piece := list(islice(lines, _LINES_AT_ONCE)):
            yield "\n".join(piece) + "\n"
            await self.context.clock.sleep(0)

    async def _check_reader(self, request: Request) -> None:
        """Refuse a client that may not read metrics."""
        denial = await self.context.metrics_access.denial(request.scope)
        if denial is not None:
            raise RefusedError(errors.metrics_denied(denial.status, denial.message))

    async def demand_text(self, request: Request) -> Response:
        """Return the metrics that the reconciler reads."""
        await self._check_reader(request)
        # The reconciler detects by this id that another gateway answers at the same address.
        headers = {wire_headers.GATEWAY: self.context.id}
        text = self.context.recorder.metrics.demand_text()
        return Response(text, media_type=CONTENT_TYPE, headers=headers)

    async def only_post(self) -> Response:
        """Refuse methods other than POST."""
        raise HTTPException(405, headers={"allow": "POST"})


def _status(table_cache: TableCache) -> str:
    """Return the health as text whose first word is the state."""
    if not table_cache.is_synced:
        return "not synced: etcd was not reached yet"
    if table_cache.source == "snapshot":
        return "degraded: etcd was not reached since the start; using the saved fleet state"
    if table_cache.is_stale:
        return "degraded: etcd is unreachable; using the last known fleet state"
    return "ok"


def _model_body(model: ServedModel) -> Json:
    # As vLLM: the adapter, and the model that it changes.
    lora = {"root": model.name.rpartition(":")[2], "parent": model.parent} if model.parent else {}
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "mlx-fleet",
        # vLLM's name of the context.
        "max_model_len": model.context_length,
        **lora,
    }
