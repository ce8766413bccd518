"""Routes of the engine: OpenAI's API, and probes of the engine itself.

Nothing is sent before the first token exists. Until then a gateway can give the request to another replica without the
client noticing, so a late refusal, such as a drain, is still a refusal with a status code.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine import in_flight
from engine.api import openapi, web
from engine.api.asgi_responses import GenerationResponse, WholeResponse
from engine.api.generation_stream import Deadline
from engine.api.speech import SpeechRoutes
from engine.api.web import RequestOptions
from engine.cache.interface import BLOCK_TOKENS
from engine.jobs import EmbeddingOutput
from engine.lifecycle import EngineState
from engine.openai import (
    embeddings,
    request_body,
    responses,
    similarity,
    tokenization,
)
from engine.openai.embeddings import EmbeddedTexts, EmbeddingRequest
from engine.openai.request_body import GenerationRequest, RequestPolicy
from engine.openai.responses import ResponsesRequest
from engine.openai.similarity import SimilarityRequest
from engine.openai.tokenization import DetokenizeBody, TokenizeRequest
from engine.service import Service
from engine.vllm_metrics import VllmMetrics
from identity.names import Role
from identity.peers import peer_of
from machinery import host_header
from machinery.engine_link import EngineGauges
from machinery.http_server import SSL_OBJECT
from machinery.prometheus import CONTENT_TYPE
from machinery.version import version
from schemas.wire import headers, recent_prompts, vllm_metrics
from schemas.wire import in_flight as in_flight_wire
from schemas.wire.body_limits import body_limit
from schemas.wire.errors import Refusal, RefusedError

# Schemas of this size take some 10 ms.
_LARGE_BODY_BYTES = 32 << 10

log = logging.getLogger(__name__)
T = TypeVar("T")
_B = TypeVar("_B", EmbeddingRequest, SimilarityRequest, TokenizeRequest, DetokenizeBody)


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
        Route("/v1/score", routes.score, methods=["POST"]),
        Route("/v1/rerank", routes.rerank, methods=["POST"]),
        Route("/tokenize", routes.tokenize, methods=["POST"]),
        Route("/detokenize", routes.detokenize, methods=["POST"]),
        *SpeechRoutes(service).routes(),
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
    address = service.config.address
    names = None if address.socket else host_header.machine_names(address.host)
    return web.RequestMiddleware(
        app, routes.headers, service.request_log, paths, names, lambda: service.progress
    )


def read_gauges(service: Service) -> EngineGauges:
    """Return the state and the load of the engine; memory only once its limits are known."""
    admission, gauges = service.admission, service.gauges
    free = None
    if gauges.limit_bytes:
        used = max(0, gauges.active_bytes - gauges.prefix_bytes)
        free = max(0, 100 - 100 * used // gauges.limit_bytes) / 100
    return EngineGauges(
        replica=service.config.replica,
        is_ready=service.state is EngineState.READY,
        in_flight=admission.in_flight,
        queued=admission.queued,
        memory_free=free,
        kv_used=gauges.kv_usage if gauges.kv_limit_bytes else None,
    )


@dataclass(frozen=True, slots=True)
class GenerationRoutes:
    """Routes of OpenAI's API. Each parses one request and returns its ASGI response."""

    service: Service
    _parser: ThreadPoolExecutor = field(
        # One thread: several would take the interpreter from the event loop and the worker of MLX.
        default_factory=lambda: ThreadPoolExecutor(max_workers=1, thread_name_prefix="parse")
    )

    def headers(self) -> Mapping[str, str]:
        """Return the headers of every response: the replica and its load, by which routers choose."""
        gauges = read_gauges(self.service)
        lines = {
            headers.NODE: self.service.config.node,
            headers.REPLICA: gauges.replica,
            headers.IN_FLIGHT: str(gauges.in_flight),
            headers.QUEUED: str(gauges.queued),
        }
        if gauges.memory_free is not None:
            lines[headers.MEMORY_FREE] = str(round(100 * gauges.memory_free))
        if gauges.kv_used is not None:
            lines[headers.KV_USED] = str(round(1e6 * gauges.kv_used))
        return lines

    async def models(self, _: Request) -> Response:
        """List the served names."""
        config = self.service.config
        data = [self._model(name) for name in (*config.served_names, *config.adapters)]
        return web.json_response({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """Describe one served name."""
        name = request.path_params["name"]
        self._check_model(name)
        return web.json_response(self._model(name))

    def _model(self, name: str) -> dict[str, object]:
        created = int(self.service.started.timestamp())
        config = self.service.config
        # As vLLM: `parent` is the model of an adapter, and `root` what is loaded.
        base = config.served_names[0]
        root = config.adapters[name].name if name in config.adapters else base
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "mlx-fleet",
            "max_model_len": config.context_length,
            "root": root,
            "parent": base if name in config.adapters else None,
        }

    async def chat(self, request: Request) -> GenerationResponse:
        """Continue a conversation."""
        return await self._generate(request, request_body.parse_chat, prompts=1)

    async def complete(self, request: Request) -> GenerationResponse:
        """Continue a text."""
        concurrency = self.service.config.concurrency
        return await self._generate(request, request_body.parse_completion, prompts=concurrency)

    async def respond(self, request: Request) -> GenerationResponse:
        """Continue a conversation, in the form of OpenAI's Responses API."""
        return await self._generate(request, responses.parse, prompts=1)

    async def _generate(
        self,
        request: Request,
        parse: Callable[..., GenerationRequest | ResponsesRequest],
        *,
        prompts: int,
    ) -> GenerationResponse:
        arrived_s = self.service.clock.monotonic()
        options, raw = await self._read(request, prompts=prompts)
        parsed = await self._parse(
            raw, partial(parse, is_resumable=options.is_resumable, policy=self._policy())
        )
        self._check_model(parsed.model)
        response = parsed if isinstance(parsed, ResponsesRequest) else None
        chat = parsed.chat if isinstance(parsed, ResponsesRequest) else parsed
        salted = request_body.with_key_salt(chat, options.cache_salt)
        deadline = Deadline.of(arrived_s, options.timeout_s)
        return GenerationResponse(self.service, salted, arrived_s, deadline, response)

    async def embed(self, request: Request) -> WholeResponse:
        """Return the embeddings of texts."""
        most = embeddings.MAX_INPUTS
        return await self._answer(request, embeddings.parse, self._embeddings, prompts=most)

    async def _embeddings(self, request: EmbeddingRequest) -> bytes:
        embedded = await self._embed(request)
        return await asyncio.to_thread(embeddings.encode_response, request, embedded)

    async def score(self, request: Request) -> WholeResponse:
        """Return the similarity of texts in pairs."""
        most = embeddings.MAX_INPUTS
        return await self._answer(request, similarity.parse_score, self._scores, prompts=most)

    async def rerank(self, request: Request) -> WholeResponse:
        """Return documents in the order of their similarity to a query."""
        most = embeddings.MAX_INPUTS
        return await self._answer(request, similarity.parse_rerank, self._scores, prompts=most)

    async def _scores(self, request: SimilarityRequest) -> bytes:
        pooling = self.service.admit().ready.pooling
        embedded = await self._embed(request.inputs_of(pooling))
        kind = "score" if request.reranked is None else "rerank"
        response_id = self.service.job_response_id(embedded.job, kind=kind)
        return await asyncio.to_thread(similarity.encode_response, request, embedded, response_id)

    async def _embed(self, request: EmbeddingRequest) -> EmbeddedTexts:
        pooling = self.service.admit().ready.pooling
        job, ticket = await self.service.enter_embedding(request)
        try:
            output = await ticket.next()
        finally:
            self.service.admission.leave(ticket)
        assert isinstance(output, EmbeddingOutput)
        assert pooling is not None  # `enter_embedding` refuses a model without
        return EmbeddedTexts(job=job, output=output, pooling=pooling)

    async def tokenize(self, request: Request) -> WholeResponse:
        """Return the tokens of a prompt, and their number."""
        parse = partial(tokenization.parse, sees_images=self.service.config.vision is not None)
        return await self._answer(request, parse, self._tokens, prompts=1)

    async def _tokens(self, request: TokenizeRequest) -> bytes:
        tokens = await self.service.tokens(request.request)
        return tokenization.encode_response(request, tokens, self.service.config.context_length)

    async def detokenize(self, request: Request) -> WholeResponse:
        """Return the text of tokens."""
        length = self.service.config.context_length
        parse = partial(tokenization.parse_tokens, context_length=length)
        return await self._answer(request, parse, self._text, prompts=1)

    async def _text(self, request: DetokenizeBody) -> bytes:
        return tokenization.encode_text(await self.service.text(request.tokens))

    async def _answer(
        self,
        request: Request,
        parse: Callable[[bytes], _B],
        make: Callable[[_B], Awaitable[bytes]],
        *,
        prompts: int,
    ) -> WholeResponse:
        """Return a response that `make` makes of the parsed body."""
        arrived_s = self.service.clock.monotonic()
        options, raw = await self._read(request, prompts=prompts)
        web.check_not_resumable(options)
        parsed = await self._parse(raw, parse)
        self._check_model(parsed.model)
        deadline = Deadline.of(arrived_s, options.timeout_s)
        return WholeResponse(self.service, partial(make, parsed), deadline)

    def _policy(self) -> RequestPolicy:
        config = self.service.config
        return RequestPolicy(
            context_length=config.context_length,
            sampling=config.sampling,
            refuses_unknown=config.unknown_parameters == "Refuse",
            always_performance=config.performance == "Always",
            sees_images=config.vision is not None,
        )

    async def _read(self, request: Request, *, prompts: int) -> tuple[RequestOptions, bytes]:
        """Return the options and the body of a request with at most so many prompts."""
        self.service.admit()  # before the body is read
        self.service.admission.check_room()
        options = web.read_options(request.headers)
        config = self.service.config
        limit = body_limit(
            config.context_length, config.vision, prompts=prompts, most=config.max_body_bytes
        )
        body = await web.read_body(request, limit, self.service.claim_body())
        # Not before: a client that sends its body slowly must not hold a place.
        self.service.arrive()
        return options, body

    async def _parse(self, raw: bytes, parse: Callable[[bytes], T]) -> T:
        """Return a parsed body; a large one is parsed in a thread, so that others are served meanwhile."""
        if len(raw) <= _LARGE_BODY_BYTES:
            return parse(raw)
        return await asyncio.get_running_loop().run_in_executor(self._parser, parse, raw)

    def _check_model(self, name: str) -> None:
        web.check_model(name, (*self.service.config.served_names, *self.service.config.adapters))


@dataclass(frozen=True, slots=True)
class ProbeRoutes:
    """Routes about the engine itself. None of them waits for the model."""

    service: Service

    def routes(self) -> list[Route]:
        """Return the routes with their paths."""
        return [
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/cache", self.cache, methods=["GET"]),
            Route(vllm_metrics.PATH, self.vllm_metrics, methods=["GET"]),
            Route(recent_prompts.ENGINE_PATH, self.prompts, methods=["GET"]),
            Route(in_flight_wire.ENGINE_PATH, self.in_flight, methods=["GET"]),
            Route(in_flight_wire.CANCEL_PATH, self.cancel, methods=["POST"]),
        ]

    async def health(self, _: Request) -> Response:
        """Report the state of the process and its worker; 200 only while it takes requests.

        `progress` grows as long as the worker advances. The worker is stuck if `progress` stands still while `busy`
        is true, for longer than the slowest step may take.
        """
        service, config, gauges = self.service, self.service.config, self.service.gauges
        body = {
            "state": service.state,
            "replica": config.replica,
            "replicaUid": config.replica_uid,
            "node": config.node,
            "models": (*config.served_names, *config.adapters),
            "pid": os.getpid(),
            "loadedBytes": gauges.loaded_bytes,
            "totalBytes": gauges.total_bytes,
            "steps": gauges.steps,
            "slowest_s": gauges.slowest_s,
            "readyAfter_s": service.ready_after_s,
            "rank": config.group.rank if config.group is not None else 0,
            "epoch": config.group.epoch if config.group is not None else 0,
            "progress": service.progress,
            "busy": service.is_busy,
            "inFlight": service.admission.in_flight,
            "queued": service.admission.queued,
            "cachedBlocks": len(gauges.prefix_blocks),
            "activeBytes": gauges.active_bytes,
            "peakBytes": gauges.process_peak_bytes,
            "message": service.message,
        }
        if config.prefixes:
            body["prefixes"], body["prefixesMessage"] = service.pinned_prefixes
        return web.json_response(body, 200 if service.state is EngineState.READY else 503)

    async def ready(self, _: Request) -> Response:
        """Report whether the model serves: 200, or the refusal that a request would get.

        Raises:
            RefusedError: it does not serve; has the reason.

        """
        self.service.check_ready()
        config = self.service.config
        models = (*config.served_names, *config.adapters)
        return web.json_response({"ready": True, "models": models})

    async def metrics(self, _: Request) -> Response:
        """Export the metrics in the Prometheus text format."""
        service = self.service
        service.speed.sample(service.clock.monotonic())
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    async def vllm_metrics(self, _: Request) -> Response:
        """Export the metrics under the names of vLLM, for dashboards and routers that are made for it."""
        service = self.service
        metrics = VllmMetrics(
            metrics=service.metrics,
            model=service.config.served_names[0],
            adapters=tuple(service.config.adapters),
            under_way=service.request_log.under_way,
            now=lambda: service.clock.now().timestamp(),
        )
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    async def in_flight(self, _: Request) -> Response:
        """List the requests in flight with their phase and progress; without anything of their text."""
        service = self.service
        records, positions = service.request_log.under_way(), service.gauges.prompt_positions
        requests = in_flight.report(records, positions, service.clock.monotonic())
        return web.json_response(requests.model_dump(mode="json", by_alias=True))

    async def cancel(self, request: Request) -> Response:
        """End the requests with one id; their clients get an error.

        Raises:
            RefusedError: there is none.

        """
        service, request_id = self.service, request.path_params["id"]
        records = service.request_log.under_way()
        count = in_flight.cancel(records, service.admission, request_id)
        if not count:
            message = f"No request in flight has the id {request_id[:128]!r}; GET {in_flight_wire.ENGINE_PATH} lists them."
            raise RefusedError(Refusal(status=404, message=message, code="request_not_found"))
        log.info("request cancelled", extra={"request_id": request_id[:128], "count": count})
        cancelled_requests = in_flight_wire.CancelledRequests(id=request_id[:128], cancelled=count)
        return web.json_response(cancelled_requests.model_dump(mode="json", by_alias=True))

    async def cache(self, _: Request) -> Response:
        """List the cached prefixes, by which a gateway sends similar requests to the same replica.

        `cache/prefix_cache.py` defines how the name of a block is computed from the tokens of a prompt.
        """
        blocks = self.service.gauges.prefix_blocks
        return web.json_response({"block": BLOCK_TOKENS, "blocks": blocks})

    async def prompts(self, request: Request) -> Response:
        """List the beginnings of the last prompts, for an engine that takes over.

        Raises:
            RefusedError: the sender is not the agent of this node.

        """
        self._check_agent(request)
        report = self.service.prompts.report()
        return web.json_response(report.model_dump(mode="json", by_alias=True))

    def _check_agent(self, request: Request) -> None:
        """Refuse all but the node's agent: by its certificate, or by the owner of the socket."""
        if self.service.config.address.socket:
            return
        peer = peer_of(request.scope.get("state", {}).get(SSL_OBJECT))
        if peer is None or peer.identity.role is not Role.NODE:
            message = "Prompts are shown to the agent of this node alone, by its certificate."
            raise RefusedError(Refusal(status=403, message=message, code="agent_only"))
