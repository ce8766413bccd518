"""Routes of Ollama's API that need no engine."""

from dataclasses import dataclass

import msgspec
import orjson
from fastapi import FastAPI, Request, Response

from gateway import errors
from gateway.apis.adapter import decode
from gateway.apis.ollama import response_translator
from gateway.apis.ollama.adapter import resolve_name
from gateway.auth.access_control import AccessControl, can_see, principal_of
from gateway.routing.selection import idle_models, nearest
from gateway.routing.table import ServedModel
from gateway.state.table_cache import TableCache
from schemas.wire.errors import RefusedError, body_too_large, invalid

# A model name and a few options.
_BODY_LIMIT = 64 << 10
# Model management, which is refused with advice.
_MANAGED = ("/api/create", "/api/copy", "/api/delete", "/api/push")


class _NamedModel(msgspec.Struct, forbid_unknown_fields=True):
    model: str = ""
    name: str = ""
    """The old name of `model`."""
    verbose: bool | None = None
    insecure: bool | None = None
    stream: bool | None = None
    system: str | None = None
    template: str | None = None
    options: dict[str, object] | None = None


_NAMED = msgspec.json.Decoder(_NamedModel)


def is_ollama_client(request: Request) -> bool:
    """Return whether the client is one of Ollama's: its program or a library in Go, Python or JavaScript."""
    return request.headers.get("user-agent", "").lower().startswith("ollama")


def root_response() -> Response:
    """Answer GET / as Ollama does; its clients detect a server by it."""
    return Response("Ollama is running", media_type="text/plain")


def add_routes(app: FastAPI, table_cache: TableCache, access: AccessControl) -> None:
    """Add the routes to the application."""
    routes = OllamaRoutes(table_cache, access)
    app.add_api_route("/api/version", routes.version, methods=["GET", "HEAD"])
    app.add_api_route("/api/tags", routes.tags, methods=["GET", "HEAD"])
    app.add_api_route("/api/ps", routes.running, methods=["GET", "HEAD"])
    app.add_api_route("/api/show", routes.show, methods=["POST"])
    app.add_api_route("/api/pull", routes.pull, methods=["POST"])
    for path in _MANAGED:
        app.add_api_route(path, routes.manage, methods=["POST", "DELETE"])


@dataclass(frozen=True, slots=True)
class OllamaRoutes:
    """Route handlers, one method for each route."""

    table_cache: TableCache
    access: AccessControl

    async def version(self) -> Response:
        """Return the version of Ollama's API."""
        return _json({"version": response_translator.VERSION})

    async def tags(self, request: Request) -> Response:
        """List the models that the client may use."""
        if not self.table_cache.is_synced:
            raise RefusedError(errors.not_synced())
        return _json(response_translator.tags_body(self._models(request)))

    async def running(self, request: Request) -> Response:
        """List the models that have a replica."""
        if not self.table_cache.is_synced:
            raise RefusedError(errors.not_synced())
        return _json(response_translator.running_body(self._models(request)))

    async def show(self, request: Request) -> Response:
        """Describe one model."""
        return _json(response_translator.show_body(await self._named(request)))

    async def pull(self, request: Request) -> Response:
        """Confirm that a model exists; clients pull a model before they use it."""
        await self._named(request)
        return Response(b'{"status":"success"}\n', media_type="application/x-ndjson")

    async def manage(self) -> Response:
        """Refuse model management."""
        raise invalid(
            "Models come and go with ModelDeployments here: declare one and `fleetctl apply` it."
        )

    def _models(self, request: Request) -> list[ServedModel]:
        models = sorted(self.table_cache.table.models.values(), key=lambda model: model.name)
        return [model for model in models if can_see(request, model.name)]

    async def _named(self, request: Request) -> ServedModel:
        """Return the model that the body names.

        Raises:
            RefusedError: the client may not use the model, or it does not exist.

        """
        if not self.table_cache.is_synced:
            raise RefusedError(errors.not_synced())
        body_fields = decode(_NAMED, _NamedModel, await _body(request))
        name = resolve_name(self.table_cache, body_fields.model or body_fields.name)
        if not name:
            raise invalid('"model" must be the name of a model, as a string.', param="model")
        self.access.allow(principal_of(request), name)
        table = self.table_cache.table
        found = table.models.get(name)
        if found is None:
            names = [model.name for model in self._models(request)]
            # A suggestion must not reveal models that the client may not use.
            near = nearest(table, name) if len(names) == len(table.models) else None
            raise RefusedError(errors.unknown_model(name, names, near, idle_models(table)))
        return found


async def _body(request: Request) -> bytes:
    if (coding := request.headers.get("content-encoding", "identity")) != "identity":
        raise RefusedError(errors.compressed(coding))
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _BODY_LIMIT:
            raise body_too_large(_BODY_LIMIT)
    return bytes(body)


def _json(body: response_translator.Json) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
