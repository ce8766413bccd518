"""The engine's routes, in OpenAI's shape. Nothing is sent before the first token exists.

Until then a gateway may give the request to another replica without the client noticing; so a
refusal that comes late, such as a drain, is still a refusal with a status code.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from machinery.version import version
from nodeagent.engine.api import headers, openapi, web
from nodeagent.engine.api.answer import Answer
from nodeagent.engine.api.embeddings import EmbeddingAnswer
from nodeagent.engine.api.headers import Wishes
from nodeagent.engine.api.probes import Probes
from nodeagent.engine.api.tokenizing import TokenizeAnswer
from nodeagent.engine.errors import Refusal, RefusedError
from nodeagent.engine.openai import bodies, embeddings, responses, tokenizing
from nodeagent.engine.service import Service


def make_app(service: Service) -> web.StampedApp:
    """Return the ASGI application."""
    routes = Routes(service)
    served = [
        *Probes(service).routes(),
        Route("/v1/models", routes.models, methods=["GET"]),
        Route("/v1/models/{name:path}", routes.model, methods=["GET"]),
        Route("/v1/chat/completions", routes.chat, methods=["POST"]),
        Route("/v1/completions", routes.complete, methods=["POST"]),
        Route("/v1/responses", routes.respond, methods=["POST"]),
        Route("/v1/embeddings", routes.embed, methods=["POST"]),
        Route("/tokenize", routes.tokenize, methods=["POST"]),
    ]
    app = Starlette(
        routes=[*served, openapi.route(served, version=version())],
        exception_handlers={
            RefusedError: web.on_refused,
            HTTPException: web.on_http_error,
            Exception: web.on_crash,
        },
    )
    app.router.redirect_slashes = False
    paths = frozenset(route.path for route in app.routes if isinstance(route, Route))
    return web.StampedApp(app, routes.headers, service.visits, paths)


@dataclass(frozen=True, slots=True)
class Routes:
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

    async def chat(self, request: Request) -> Answer:
        """Continue a conversation."""
        return await self._answer(request, bodies.parse_chat)

    async def complete(self, request: Request) -> Answer:
        """Continue a text."""
        return await self._answer(request, bodies.parse_completion)

    async def respond(self, request: Request) -> Answer:
        """Continue a conversation, in the shape of OpenAI's Responses."""
        arrived_s = self.service.clock.monotonic()
        wishes, raw = await self._read(request)
        headers.check_not_resumable(wishes)
        wanted = responses.parse(raw)
        self._check_model(wanted.model)
        return Answer(self.service, wanted.chat, arrived_s, wishes.timeout_s, wanted)

    async def embed(self, request: Request) -> EmbeddingAnswer:
        """Turn texts into vectors."""
        arrived_s = self.service.clock.monotonic()
        wishes, raw = await self._read(request)
        headers.check_not_resumable(wishes)
        wanted = embeddings.parse(raw)
        self._check_model(wanted.model)
        return EmbeddingAnswer(self.service, wanted, arrived_s, wishes.timeout_s)

    async def tokenize(self, request: Request) -> TokenizeAnswer:
        """Count the tokens of a prompt."""
        arrived_s = self.service.clock.monotonic()
        wishes, raw = await self._read(request)
        headers.check_not_resumable(wishes)
        wanted = tokenizing.parse(raw)
        self._check_model(wanted.request.model)
        return TokenizeAnswer(self.service, wanted, arrived_s, wishes.timeout_s)

    async def _answer(self, request: Request, parse: Callable[..., bodies.Request]) -> Answer:
        arrived_s = self.service.clock.monotonic()
        wishes, raw = await self._read(request)
        wanted = parse(raw, is_resumable=wishes.is_resumable)
        self._check_model(wanted.model)
        return Answer(self.service, wanted, arrived_s, wishes.timeout_s)

    async def _read(self, request: Request) -> tuple[Wishes, bytes]:
        self.service.admit()  # before the body is read
        wishes = headers.read(request.headers)
        return wishes, await web.read_body(request, self.service.config.max_body_bytes)

    def _check_model(self, name: str) -> None:
        served = self.service.config.served_names
        if name in served:
            return
        message = f"The model '{name[:200]}' does not exist here. This replica serves: {', '.join(served)}."
        raise RefusedError(
            Refusal(status=404, message=message, param="model", code="model_not_found")
        )
