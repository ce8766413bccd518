"""What is asked about the engine itself: is it alive, does it serve, what does it do, what has it cached.

No request for the model comes by here, and every answer is made of figures that are there already.

The engine's routes, in OpenAI's shape. Nothing is sent before the first token exists.

Until then a gateway may give the request to another replica without the client noticing; so a
refusal that comes late, such as a drain, is still a refusal with a status code.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine import process_memory
from engine.api import openapi, web
from engine.api.asgi_responses import EmbeddingResponse, GenerationResponse, TokenizeResponse
from engine.api.web import RequestOptions
from engine.cache.interface import BLOCK_TOKENS
from engine.errors import Refusal, RefusedError
from engine.gauges import EngineState
from engine.openai import embeddings, request_body, responses, tokenization
from engine.service import Service
from machinery.prometheus import CONTENT_TYPE
from machinery.version import version


@dataclass(frozen=True, slots=True)
class ProbeRoutes:
    """One method a route."""

    service: Service

    def routes(self) -> list[Route]:
        """Return them with their paths."""
        return [
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/cache", self.cache, methods=["GET"]),
        ]

    async def health(self, _: Request) -> Response:
        """Say how the process and its worker are; 200 only if it takes requests.

        `progress` grows for as long as the worker gets anywhere. Whoever sees it stand still while `busy` is true,
        for longer than the slowest step may take, sees a stuck worker.
        """
        service, config, gauges = self.service, self.service.config, self.service.gauges
        body = {
            "state": service.state,
            "replica": config.replica,
            "replicaUid": config.replica_uid,
            "node": config.node,
            "models": config.served_names,
            "pid": os.getpid(),
            "loadedBytes": gauges.loaded_bytes,
            "totalBytes": gauges.total_bytes,
            "steps": gauges.steps,
            "slowest_s": gauges.slowest_s,
            "rank": config.group.rank if config.group is not None else 0,
            "epoch": config.group.epoch if config.group is not None else 0,
            "progress": gauges.progress,
            "busy": service.is_busy,
            "inFlight": service.admission.in_flight,
            "queued": service.admission.queued,
            "cachedBlocks": len(gauges.prefix_blocks),
            "activeBytes": gauges.active_bytes,
            "peakBytes": process_memory.peak_bytes(gauges.peak_bytes),
            "message": service.message,
        }
        return web.json_response(body, 200 if service.state is EngineState.READY else 503)

    async def ready(self, _: Request) -> Response:
        """Say whether the model serves: 200, or the refusal that requests get.

        Raises:
            RefusedError: it does not, and why.

        """
        self.service.admit()
        return web.json_response({"ready": True, "models": self.service.config.served_names})

    async def metrics(self, _: Request) -> Response:
        """Show what was counted and measured, in Prometheus' text form."""
        service = self.service
        service.speed.look(service.clock.monotonic())
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    async def cache(self, _: Request) -> Response:
        """List what prefixes are cached, for a gateway that sends alike requests to the same replica.

        `cache/prefix.py` (summary) says how a block's name is computed from a prompt's tokens.
        """
        blocks = self.service.gauges.prefix_blocks
        return web.json_response({"block": BLOCK_TOKENS, "blocks": blocks})


def make_app(service: Service) -> web.RequestMiddleware:
    """Return the ASGI application."""
    routes = GenerationRoutes(service)
    served = [
        *ProbeRoutes(service).routes(),
        Route("/v1/models", routes.models, methods=["GET"]),
        Route("/v1/models/{name:path}", routes.model, methods=["GET"]),
        Route("/v1/chat/completions", routes.chat, methods=["POST"]),
        Route("/v1/completions", routes.complete, methods=["POST"]),
        Route("/v1/responses", routes.respond, methods=["POST"]),
        Route("/v1/embeddings", routes.embed, methods=["POST"]),
        Route("/tokenize", routes.tokenize, methods=["POST"]),
    ]
    app = Starlette(
        routes=[*served, openapi.document_route(served, version=version())],
        exception_handlers={
            RefusedError: web.on_refused,
            HTTPException: web.on_http_error,
            Exception: web.on_crash,
        },
    )
    app.router.redirect_slashes = False
    paths = frozenset(route.path for route in app.routes if isinstance(route, Route))
    return web.RequestMiddleware(app, routes.headers, service.request_log, paths)


@dataclass(frozen=True, slots=True)
class GenerationRoutes:
    """One method a route."""

    service: Service

    def headers(self) -> Mapping[str, str]:
        """Return who answers, and how busy it is: what a gateway weighs replicas by."""
        config, admission = self.service.config, self.service.admission
        return {
            "x-fleet-node": config.node,
            "x-fleet-replica": config.replica,
            "x-fleet-in-flight": str(admission.in_flight),
            "x-fleet-queued": str(admission.queued),
            **self._free(),
        }

    def _free(self) -> dict[str, str]:
        """Return which part of the memory is free or given up for who needs it, in percent; nothing before it is known."""
        gauges = self.service.gauges
        if not gauges.limit_bytes:
            return {}
        taken = max(0, gauges.active_bytes - gauges.prefix_bytes)
        free = max(0, 100 - 100 * taken // gauges.limit_bytes)
        return {"x-fleet-memory-free": str(free)}

    async def models(self, _: Request) -> Response:
        """List the names under which the model is served."""
        data = [self._model(name) for name in self.service.config.served_names]
        return web.json_response({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """Describe one of them."""
        name = request.path_params["name"]
        self._check_model(name)
        return web.json_response(self._model(name))

    def _model(self, name: str) -> dict[str, object]:
        created = int(self.service.started.timestamp())
        return {"id": name, "object": "model", "created": created, "owned_by": "mlx-fleet"}

    async def chat(self, request: Request) -> GenerationResponse:
        """Continue a conversation."""
        return await self._answer(request, request_body.parse_chat)

    async def complete(self, request: Request) -> GenerationResponse:
        """Continue a text."""
        return await self._answer(request, request_body.parse_completion)

    async def respond(self, request: Request) -> GenerationResponse:
        """Continue a conversation, in the shape of OpenAI's Responses."""
        arrived_s = self.service.clock.monotonic()
        wishes, raw = await self._read(request)
        web.check_not_resumable(wishes)
        wanted = responses.parse(raw)
        self._check_model(wanted.model)
        return GenerationResponse(self.service, wanted.chat, arrived_s, wishes.timeout_s, wanted)

    async def embed(self, request: Request) -> EmbeddingResponse:
        """Turn texts into vectors."""
        arrived_s = self.service.clock.monotonic()
        wishes, raw = await self._read(request)
        web.check_not_resumable(wishes)
        wanted = embeddings.parse(raw)
        self._check_model(wanted.model)
        return EmbeddingResponse(self.service, wanted, arrived_s, wishes.timeout_s)

    async def tokenize(self, request: Request) -> TokenizeResponse:
        """Count the tokens of a prompt."""
        arrived_s = self.service.clock.monotonic()
        wishes, raw = await self._read(request)
        web.check_not_resumable(wishes)
        wanted = tokenization.parse(raw)
        self._check_model(wanted.request.model)
        return TokenizeResponse(self.service, wanted, arrived_s, wishes.timeout_s)

    async def _answer(
        self, request: Request, parse: Callable[..., request_body.GenerationRequest]
    ) -> GenerationResponse:
        arrived_s = self.service.clock.monotonic()
        wishes, raw = await self._read(request)
        wanted = parse(raw, is_resumable=wishes.is_resumable)
        self._check_model(wanted.model)
        return GenerationResponse(self.service, wanted, arrived_s, wishes.timeout_s)

    async def _read(self, request: Request) -> tuple[RequestOptions, bytes]:
        self.service.admit()  # before the body is read
        wishes = web.read_options(request.headers)
        return wishes, await web.read_body(request, self.service.config.max_body_bytes)

    def _check_model(self, name: str) -> None:
        served = self.service.config.served_names
        if name in served:
            return
        message = f"The model '{name[:200]}' does not exist here. This replica serves: {', '.join(served)}."
        raise RefusedError(
            Refusal(status=404, message=message, param="model", code="model_not_found")
        )
