"""Routes of LM Studio and llama-swap that load and unload models, so that their clients manage those of a fleet."""

from dataclasses import dataclass

import msgspec
from fastapi import FastAPI, Request, Response

from gateway.apis.adapter import decode
from gateway.apis.http_bodies import json_response, read_body
from gateway.apis.model_loads import ModelLoads
from gateway.auth.access_control import principal_of
from gateway.routing.table import ServedModel
from schemas.wire.errors import invalid


class _Load(msgspec.Struct, forbid_unknown_fields=True):
    model: str = ""
    context_length: int | None = None
    eval_batch_size: int | None = None
    flash_attention: bool | None = None
    num_experts: int | None = None
    offload_kv_cache_to_gpu: bool | None = None
    echo_load_config: bool | None = None


class _Unload(msgspec.Struct, forbid_unknown_fields=True):
    instance_id: str = ""


_LOAD, _UNLOAD = msgspec.json.Decoder(_Load), msgspec.json.Decoder(_Unload)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalServerRoutes:
    """Route handlers, one method for each route."""

    loads: ModelLoads

    def add_to(self, app: FastAPI) -> None:
        """Add the routes to the application."""
        app.add_api_route("/api/v1/models/load", self.load, methods=["POST"])
        app.add_api_route("/api/v1/models/unload", self.unload_instance, methods=["POST"])
        app.add_api_route("/running", self.running, methods=["GET", "HEAD"])
        app.add_api_route("/api/models/unload", self.unload_all, methods=["POST"])
        app.add_api_route("/api/models/unload/{name:path}", self.unload_one, methods=["POST"])

    async def load(self, request: Request) -> Response:
        """Load a model as LM Studio does: answer when it is ready."""
        body_fields, loads = decode(_LOAD, await read_body(request)), self.loads
        began_s, name = loads.clock.monotonic(), loads.ask(request, body_fields.model)
        self._check_context(name, body_fields.context_length)
        async for _ in loads.load(request, name):
            pass  # the answer has no form for progress
        context = self._check_context(name, body_fields.context_length)
        config = (
            {"load_config": {"context_length": context}} if body_fields.echo_load_config else {}
        )
        members = {
            "type": "llm",
            "instance_id": name,
            "load_time_seconds": round(loads.clock.monotonic() - began_s, 3),
            "status": "loaded",
            **config,
        }
        return json_response(members)

    def _check_context(self, name: str, wanted: int | None) -> int | None:
        """Return the context of a model, None if that is not known. Raises RefusedError if more is wanted."""
        model = self.loads.table_cache.table.models.get(name)
        context = None if model is None else model.context_length
        if context is not None and wanted is not None and wanted > context:
            raise invalid(
                f"The model '{name}' has a context of {context} tokens; spec.contextLength of the ModelDeployment gives more.",
                param="context_length",
            )
        return context

    async def unload_instance(self, request: Request) -> Response:
        """Unload a model as LM Studio does; a model's instance has its name."""
        body_fields = decode(_UNLOAD, await read_body(request))
        model = self.loads.find(request, body_fields.instance_id)
        self.loads.unload((model,))
        return json_response({"instance_id": model.name})

    async def running(self, request: Request) -> Response:
        """List the models that have a replica, as llama-swap does."""
        models = self._loaded(request)
        return json_response({"running": [{"model": one.name, "state": "ready"} for one in models]})

    async def unload_all(self, request: Request) -> Response:
        """Unload all models that may be at zero, as llama-swap does."""
        may_be_at_zero = self.loads.table_cache.may_be_at_zero
        self.loads.unload(
            model
            for model in self._loaded(request)
            if all(may_be_at_zero(name) for name in model.deployments())
        )
        return json_response({"msg": "ok"})

    async def unload_one(self, name: str, request: Request) -> Response:
        """Unload one model, as llama-swap does."""
        self.loads.unload((self.loads.find(request, name),))
        return Response("OK", media_type="text/plain")

    def _loaded(self, request: Request) -> list[ServedModel]:
        models = self.loads.fleet_state.visible_models(principal_of(request))
        return [model for model in models if model.ready() or model.kept()]
