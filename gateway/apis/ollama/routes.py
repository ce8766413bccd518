"""Routes of Ollama's API that need no engine: lists, descriptions, and what a fleet does for its model management.

Models are declared here. `/api/pull` waits until a declared model is ready; the other verbs answer with the manifest or
command that does it.
"""

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
import orjson
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from gateway import errors
from gateway.apis.adapter import decode
from gateway.apis.ollama import response_translator
from gateway.apis.ollama.adapter import resolve_name
from gateway.apis.ollama.model_facts import FactReader, ModelFacts
from gateway.auth.access_control import AccessControl, can_see, principal_of
from gateway.forwarding.admission import Activator
from gateway.routing.table import ServedModel
from gateway.state.table_cache import TableCache
from machinery.clock import Clock
from schemas.deployment import HUB_REPO_PATTERN
from schemas.wire.errors import RefusedError, body_too_large, invalid

# A model name and a few options.
_BODY_LIMIT = 64 << 10
# A large model is fetched over a home's line meanwhile.
_PULL_LIMIT_S = 3600.0
_PULL_LINE_S = 2.0
# The places that Ollama's clients write before the name of a repository.
_HUB_HOST = re.compile(r"^(https://)?(hf|huggingface)\.co/")
_REPOSITORY = re.compile(HUB_REPO_PATTERN)
_UNSAFE = re.compile(r"[^a-z0-9-]+")


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


class _CopiedModel(msgspec.Struct, forbid_unknown_fields=True):
    source: str = ""
    destination: str = ""


_NAMED = msgspec.json.Decoder(_NamedModel)
_COPIED = msgspec.json.Decoder(_CopiedModel)


def is_ollama_client(request: Request) -> bool:
    """Return whether the client is one of Ollama's: its program or a library in Go, Python or JavaScript."""
    return request.headers.get("user-agent", "").lower().startswith("ollama")


def root_response() -> Response:
    """Answer GET / as Ollama does; its clients detect a server by it."""
    return Response("Ollama is running", media_type="text/plain")


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaRoutes:
    """Route handlers, one method for each route."""

    table_cache: TableCache
    access: AccessControl
    activator: Activator
    facts: FactReader
    clock: Clock

    def add_to(self, app: FastAPI) -> None:
        """Add the routes to the application."""
        app.add_api_route("/api/version", self.version, methods=["GET", "HEAD"])
        app.add_api_route("/api/tags", self.tags, methods=["GET", "HEAD"])
        app.add_api_route("/api/ps", self.running, methods=["GET", "HEAD"])
        app.add_api_route("/api/show", self.show, methods=["POST"])
        app.add_api_route("/api/pull", self.pull, methods=["POST"])
        app.add_api_route("/api/copy", self.copy, methods=["POST"])
        app.add_api_route("/api/delete", self.delete, methods=["DELETE", "POST"])
        app.add_api_route("/api/create", self.create, methods=["POST"])
        app.add_api_route("/api/push", self.push, methods=["POST"])

    async def version(self) -> Response:
        """Return the version of Ollama's API."""
        return _json({"version": response_translator.VERSION})

    async def tags(self, request: Request) -> Response:
        """List the models that the client may use."""
        models = self._models(request)
        return _json(response_translator.tags_body(models, await self.facts(models)))

    async def running(self, request: Request) -> Response:
        """List the models that have a replica."""
        models, now = self._models(request), self.clock.now()
        facts = await self.facts(models)
        return _json(
            response_translator.running_body(
                models, facts, lambda model: self.activator.kept_until(model.deployments(), now)
            )
        )

    async def show(self, request: Request) -> Response:
        """Describe one model."""
        body_fields = decode(_NAMED, _NamedModel, await _body(request))
        model = self._named(request, body_fields.model or body_fields.name)
        return _json(response_translator.show_body(model, await self._facts(model)))

    async def pull(self, request: Request) -> Response:
        """Wait until a declared model is ready, with the progress as lines; start it if it is scaled to zero."""
        body_fields = decode(_NAMED, _NamedModel, await _body(request))
        wanted = _HUB_HOST.sub("", body_fields.model or body_fields.name)
        model = self._named(request, wanted)
        lines = self._pull_lines(model.name, request)
        if body_fields.stream is not False:
            return StreamingResponse(lines, media_type="application/x-ndjson")
        last = b""
        async for line in lines:
            last = line
        is_failed = b'"error"' in last
        return Response(last, 503 if is_failed else 200, media_type="application/json")

    async def _pull_lines(self, name: str, request: Request) -> AsyncIterator[bytes]:
        """Yield lines until the model is ready or the client leaves."""
        until_s, shown = self.clock.monotonic() + _PULL_LIMIT_S, ""
        yield _line(status=f"pulling {name}")
        while self.clock.monotonic() < until_s:
            model = self.table_cache.table.models.get(name)
            if model is None:
                yield _line(error=f"The model '{name}' is declared no longer.")
                return
            if model.ready() or model.kept():
                yield _line(status="success")
                return
            for _, deployment in model.awaited:
                self.activator.note_missing(deployment)
            if model.reason != shown:
                shown = model.reason
                yield _line(status=shown)
            await self.table_cache.changed(within_s=_PULL_LINE_S)
            if await request.is_disconnected():
                return
        yield _line(error=f"'{name}' is not ready after {_PULL_LIMIT_S:.0f} s. {shown}")

    async def copy(self, request: Request) -> Response:
        """Confirm a name that is declared for the model already; else answer with the manifest that declares it."""
        body_fields = decode(_COPIED, _CopiedModel, await _body(request))
        source = self._named(request, body_fields.source)
        wanted = resolve_name(self.table_cache, body_fields.destination)
        if not wanted:
            raise invalid('"destination" must be the new name, as a string.', param="destination")
        known = self.table_cache.table.models.get(wanted)
        if known is not None and known.deployments() == source.deployments():
            return Response(status_code=200)
        raise _second_name(wanted, source)

    async def delete(self, request: Request) -> Response:
        """Refuse to delete a declared model, with the command that does."""
        body_fields = decode(_NAMED, _NamedModel, await _body(request))
        model = self._named(request, body_fields.model or body_fields.name)
        named = " ".join(f"modeldeployment/{name}" for name in model.deployments())
        raise invalid(
            "Clients do not delete models here, because others may use them. "
            f"`fleetctl delete {named or f'modelroute -l model={model.name}'}` does; "
            "`fleetctl models rm` then frees the disks."
        )

    async def create(self, request: Request) -> Response:
        """Refuse to create a model, with the manifest that declares it."""
        try:
            given = msgspec.json.decode(await _body(request), type=dict[str, object])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            given = {}
        name = str(given.get("model") or "NAME")
        base = _HUB_HOST.sub("", str(given.get("from") or "ORGANISATION/NAME"))
        base = resolve_name(self.table_cache, base)
        served = next((model for model in self._models(request) if model.name == base), None)
        if served is not None:
            raise _second_name(name, served)
        text = orjson.dumps(base[:200]).decode()
        source = f"hub: {{repo: {text}}}" if _REPOSITORY.fullmatch(base) else f"path: {text}"
        raise _declare(
            "Models come and go with ModelDeployments here",
            f"apiVersion: fleet/v1alpha1\nkind: ModelDeployment\nmetadata: {{name: {_object_name(name)}}}\n"
            f"spec:\n  model: {{{source}}}\n",
        )

    async def push(self) -> Response:
        """Refuse to publish a model."""
        raise invalid(
            "A fleet publishes no models; `fleetctl models export` writes one as a folder or a tar file."
        )

    def _models(self, request: Request) -> list[ServedModel]:
        """Return the models that the client may use, by name.

        Raises:
            RefusedError: the store was not read yet.

        """
        if not self.table_cache.is_synced:
            raise RefusedError(errors.not_synced())
        models = sorted(self.table_cache.table.models.values(), key=lambda model: model.name)
        return [model for model in models if can_see(request, model.name)]

    def _named(self, request: Request, wanted: str) -> ServedModel:
        """Return the model of this name.

        Raises:
            RefusedError: the client may not use the model, or it does not exist.

        """
        if not self.table_cache.is_synced:
            raise RefusedError(errors.not_synced())
        name = resolve_name(self.table_cache, wanted)
        if not name:
            raise invalid('"model" must be the name of a model, as a string.', param="model")
        self.access.allow(principal_of(request), name)
        table = self.table_cache.table
        model = table.models.get(name)
        if model is None:
            raise self.access.unknown_model(principal_of(request), table, name)
        return model

    async def _facts(self, model: ServedModel) -> ModelFacts:
        return (await self.facts((model,)))[model.name]


def _object_name(text: str) -> str:
    """Return a name for an object that stands for a model's name."""
    return _UNSAFE.sub("-", text.lower())[:60].strip("-") or "name"


def _second_name(name: str, model: ServedModel) -> RefusedError:
    """Return the manifest that gives a served model another name."""
    deployment = next(iter(model.deployments()), model.name)
    return _declare(
        "A second name of a model is declared here",
        f"apiVersion: fleet/v1alpha1\nkind: ModelRoute\nmetadata: {{name: {_object_name(name)}}}\n"
        f"spec:\n  model: {orjson.dumps(name[:200]).decode()}\n  backends: [{{deployment: {deployment}}}]\n",
    )


def _declare(why: str, manifest: str) -> RefusedError:
    return invalid(f"{why}. Save this, and `fleetctl apply -f FILE`:\n{manifest}")


def _line(**fields: str) -> bytes:
    return orjson.dumps(fields) + b"\n"


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
