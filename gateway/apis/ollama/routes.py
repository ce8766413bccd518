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

from gateway.apis.adapter import decode
from gateway.apis.http_bodies import json_response, read_body
from gateway.apis.model_loads import ModelLoads
from gateway.apis.ollama import response_translator
from gateway.apis.ollama.adapter import resolve_name
from gateway.apis.ollama.model_facts import FactReader, ModelFacts
from gateway.auth.access_control import principal_of
from gateway.routing.table import ServedModel
from schemas.deployment import HUB_REPO_PATTERN
from schemas.wire.errors import RefusedError, invalid

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

    loads: ModelLoads
    facts: FactReader

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
        return json_response({"version": response_translator.VERSION})

    async def tags(self, request: Request) -> Response:
        """List the models that the client may use."""
        models = self._models(request)
        return json_response(response_translator.tags_body(models, await self.facts(models)))

    async def running(self, request: Request) -> Response:
        """List the models that have a replica."""
        models, now = self._models(request), self.loads.clock.now()
        facts = await self.facts(models)
        return json_response(
            response_translator.running_body(
                models,
                facts,
                lambda model: self.loads.activator.kept_until(model.deployments(), now),
            )
        )

    async def show(self, request: Request) -> Response:
        """Describe one model."""
        body_fields = decode(_NAMED, await read_body(request))
        model = self.loads.find(request, body_fields.model or body_fields.name)
        return json_response(response_translator.show_body(model, await self._facts(model)))

    async def pull(self, request: Request) -> Response:
        """Wait until a model is ready, with the progress as lines; start it if it is at zero, ask for it if a policy allows it."""
        body_fields = decode(_NAMED, await read_body(request))
        name = self.loads.ask(request, body_fields.model or body_fields.name)
        lines = self._pull_lines(name, request)
        if body_fields.stream is not False:
            return StreamingResponse(lines, media_type="application/x-ndjson")
        last = b""
        async for line in lines:
            last = line
        is_failed = b'"error"' in last
        return Response(last, 503 if is_failed else 200, media_type="application/json")

    async def _pull_lines(self, name: str, request: Request) -> AsyncIterator[bytes]:
        """Yield lines until the model is ready or the client leaves."""
        yield _line(status=f"pulling {name}")
        digest = response_translator.digest(name)
        try:
            async for progress in self.loads.load(request, name):
                if progress.fetch_bytes:
                    yield _line(
                        status=f"pulling {digest[:12]}",
                        digest=f"sha256:{digest}",
                        total=progress.fetch_bytes,
                        completed=progress.fetched_bytes,
                    )
                else:
                    yield _line(status=progress.text)
        except RefusedError as error:
            yield _line(error=error.refusal.message)
            return
        yield _line(status="success")

    async def copy(self, request: Request) -> Response:
        """Confirm a name that is declared for the model already; else answer with the manifest that declares it."""
        body_fields = decode(_COPIED, await read_body(request))
        source = self.loads.find(request, body_fields.source)
        wanted = resolve_name(self.loads.table_cache, body_fields.destination)
        if not wanted:
            raise invalid('"destination" must be the new name, as a string.', param="destination")
        known = self.loads.table_cache.table.models.get(wanted)
        if known is not None and known.deployments() == source.deployments():
            return Response(status_code=200)
        raise _second_name(wanted, source)

    async def delete(self, request: Request) -> Response:
        """Refuse to delete a declared model, with the command that does."""
        body_fields = decode(_NAMED, await read_body(request))
        model = self.loads.find(request, body_fields.model or body_fields.name)
        named = " ".join(f"modeldeployment/{name}" for name in model.deployments())
        raise invalid(
            "Clients do not delete models here, because others may use them. "
            f"`fleetctl delete {named or f'modelroute -l model={model.name}'}` does; "
            "`fleetctl models rm` then frees the disks."
        )

    async def create(self, request: Request) -> Response:
        """Refuse to create a model, with the manifest that declares it."""
        try:
            given = msgspec.json.decode(await read_body(request), type=dict[str, object])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            given = {}
        name = str(given.get("model") or "NAME")
        base = resolve_name(self.loads.table_cache, str(given.get("from") or "ORGANISATION/NAME"))
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
        return self.loads.fleet_state.visible_models(principal_of(request))

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


def _line(**fields: str | int) -> bytes:
    return orjson.dumps(fields) + b"\n"
