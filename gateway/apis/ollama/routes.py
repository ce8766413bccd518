"""Ollama's paths that ask no engine for anything: FastAPI routes."""

from dataclasses import dataclass

import msgspec
import orjson
from fastapi import FastAPI, Request, Response

from gateway import errors
from gateway.apis.adapter import decode
from gateway.apis.ollama import response_translator
from gateway.apis.ollama.adapter import resolve_name
from gateway.auth.access_control import AccessControl, can_see, principal_of
from gateway.errors import RefusedError, compressed, invalid
from gateway.routing.selection import nearest
from gateway.routing.table import ServedModel
from gateway.state.table_cache import TableCache

# A model's name, and what Ollama's clients may say besides.
_BODY_LIMIT = 64 << 10
# How models come and go; whoever asks for it here learns how it is done.
_MANAGED = ("/api/create", "/api/copy", "/api/delete", "/api/push")


class _NamedModel(msgspec.Struct, forbid_unknown_fields=True):
    model: str = ""
    name: str = ""
    """What `model` was called before."""
    verbose: bool | None = None
    insecure: bool | None = None
    stream: bool | None = None
    system: str | None = None
    template: str | None = None
    options: dict[str, object] | None = None


_NAMED = msgspec.json.Decoder(_NamedModel)


def add_routes(app: FastAPI, keeper: TableCache, access: AccessControl) -> None:
    """Add the routes."""
    routes = OllamaRoutes(keeper, access)
    app.add_api_route("/", routes.root, methods=["GET", "HEAD"])
    app.add_api_route("/api/version", routes.version, methods=["GET", "HEAD"])
    app.add_api_route("/api/tags", routes.tags, methods=["GET", "HEAD"])
    app.add_api_route("/api/ps", routes.running, methods=["GET", "HEAD"])
    app.add_api_route("/api/show", routes.show, methods=["POST"])
    app.add_api_route("/api/pull", routes.pull, methods=["POST"])
    for path in _MANAGED:
        app.add_api_route(path, routes.manage, methods=["POST", "DELETE"])


@dataclass(frozen=True, slots=True)
class OllamaRoutes:
    """One method a route."""

    keeper: TableCache
    access: AccessControl

    async def root(self) -> Response:
        """Say what Ollama says, by which its clients tell that it is there."""
        return Response("Ollama is running", media_type="text/plain")

    async def version(self) -> Response:
        """Tell which version of Ollama's API this is."""
        return _json({"version": response_translator.VERSION})

    async def tags(self, request: Request) -> Response:
        """List the models that the client may use."""
        if not self.keeper.is_synced:
            raise RefusedError(errors.not_synced())
        return _json(response_translator.tags_body(self._models(request)))

    async def running(self, request: Request) -> Response:
        """List those of them that somebody serves right now."""
        if not self.keeper.is_synced:
            raise RefusedError(errors.not_synced())
        models = self._models(request)
        return _json(response_translator.running_body(models, self._contexts(models)))

    async def show(self, request: Request) -> Response:
        """Tell of one model."""
        found = await self._named(request)
        return _json(
            response_translator.show_body(found, self._contexts([found]).get(found.name, 0))
        )

    async def pull(self, request: Request) -> Response:
        """Say that a model is there, if it is: clients ask for it before they use one."""
        await self._named(request)
        return Response(b'{"status":"success"}\n', media_type="application/x-ndjson")

    async def manage(self) -> Response:
        """Refuse what is not a client's business here."""
        raise invalid(
            "Models come and go with ModelDeployments here: declare one and `fleetctl apply` it."
        )

    def _models(self, request: Request) -> list[ServedModel]:
        models = sorted(self.keeper.table.models.values(), key=lambda model: model.name)
        return [model for model in models if can_see(request, model.name)]

    async def _named(self, request: Request) -> ServedModel:
        """Return the model that the body names.

        Raises:
            RefusedError: it names none that the client may use.

        """
        if not self.keeper.is_synced:
            raise RefusedError(errors.not_synced())
        asked = decode(_NAMED, _NamedModel, await _body(request))
        name = resolve_name(self.keeper, asked.model or asked.name)
        if not name:
            raise invalid('"model" must be the name of a model, as a string.', param="model")
        self.access.allow(principal_of(request), name)
        table = self.keeper.table
        found = table.models.get(name)
        if found is None:
            names = [model.name for model in self._models(request)]
            # Who may not use all of them is not told what else there is.
            near = nearest(table, name) if len(names) == len(table.models) else None
            raise RefusedError(errors.unknown_model(name, names, near))
        return found

    def _contexts(self, models: list[ServedModel]) -> dict[str, int]:
        """Return how many tokens each takes; of several deployments, what all of them take."""
        deployments = self.keeper.known().deployments
        found = {}
        for model in models:
            names = {name for share in model.shares for name in share.deployments}
            lengths = [
                deployments[name].spec.context_length for name in names if name in deployments
            ]
            if lengths:
                found[model.name] = min(lengths)
        return found


async def _body(request: Request) -> bytes:
    if (coding := request.headers.get("content-encoding", "identity")) != "identity":
        raise RefusedError(compressed(coding))
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _BODY_LIMIT:
            raise errors.too_large(_BODY_LIMIT)
    return bytes(body)


def _json(body: response_translator.Json) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
