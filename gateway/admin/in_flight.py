"""Requests in flight at this gateway: what works on each and how far it is, and the end of one by its id.

Engines tell how much of a prompt they have read and how much they have generated; they are asked only while a client
reads the list.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Final, TypeAlias

from fastapi import APIRouter, Path, Request, Response
from pydantic import ValidationError

from gateway.apis.http_bodies import json_response
from gateway.auth.access_control import principal_of
from gateway.http.request_context import RequestContext
from gateway.routing.table import EngineEndpoint
from gateway.telemetry.request_journal import rows_json, truncate
from gateway.upstream.call import BrokenResponseError, UnreachableError
from gateway.upstream.engine_links import EngineLinks
from machinery.clock import Clock
from schemas.wire import in_flight
from schemas.wire.engine_address import EngineAddress
from schemas.wire.errors import Refusal, RefusedError
from schemas.wire.in_flight import InFlightRequest, InFlightRequests, RequestPhase
from schemas.wire.requests import RunningRequest

Progress: TypeAlias = Mapping[tuple[EngineAddress, str], InFlightRequest]
"""Reports of engines about requests, by engine and request id."""

LIST_PATH: Final = "/api/requests/in-flight"
CANCEL_PATH: Final = "/api/requests/{id:path}/cancel"
_MOST_REQUESTS: Final = 500
# A list that asks more engines would cost the requests of clients too much.
_MOST_ENGINES: Final = 64
_AT_ONCE: Final = 16
_ANSWER_S: Final = 1.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlightSource:
    """The requests under way, and how to end one."""

    running: Callable[[], Iterable[RequestContext]] = tuple
    cancel: Callable[[RequestContext], bool] = lambda _: False
    """Ends a request; returns False if it has ended."""
    links: EngineLinks | None = None
    """Links to engines; None: engines are not asked."""


def phase_of(context: RequestContext) -> RequestPhase:
    """Return what a request waits for: a slot or a replica, its first event, or its last."""
    if context.first_s:
        return "generating"
    return "prefill" if endpoint_of(context) is not None else "queued"


def endpoint_of(context: RequestContext) -> EngineEndpoint | None:
    """Return the endpoint that works on a request; None if it waits."""
    state = context.retry_state
    if state.running is not None:
        return state.running.endpoint
    return state.served_by


def describe(
    context: RequestContext, now_s: float, told: InFlightRequest | None = None
) -> RunningRequest:
    """Return a request as it is shown; `told` is what its engine tells."""
    endpoint, request = endpoint_of(context), context.request
    model = context.model
    if request is not None and model != request.model:
        model = truncate(request.model)
    return RunningRequest(
        id=context.http_request.request_id.decode("ascii"),
        path=context.http_request.path,
        model=model,
        api_key=None if context.principal is None else context.principal.name,
        worker=None if endpoint is None else endpoint.node,
        replica=None if endpoint is None else endpoint.replica,
        phase=phase_of(context),
        seconds=round(max(0.0, now_s - (context.began_s or now_s)), 3),
        streamed=request is not None and request.is_streamed,
        attempts=context.retry_state.started,
        resumptions=context.retry_state.resumptions,
        engine_phase=None if told is None else told.phase,
        prompt_tokens=None if told is None else told.prompt_tokens,
        prefilled_tokens=None if told is None else told.prefilled_tokens,
        tokens=None if told is None else told.generated_tokens,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlightRoutes:
    """Handlers of the list and of cancellations."""

    gateway: str
    source: InFlightSource
    clock: Clock

    def add_to(self, router: APIRouter) -> None:
        """Register the routes."""
        router.add_api_route(LIST_PATH, self.list, methods=["GET"])
        router.add_api_route(CANCEL_PATH, self.cancel, methods=["POST"])

    async def list(self) -> Response:
        """List the requests in flight, oldest first, with their phase and what their engine tells."""
        running = sorted(self.source.running(), key=lambda one: one.began_s)
        shown = running[:_MOST_REQUESTS]
        rows = await describe_all(shown, self.source.links, self.clock)
        body = {"gateway": self.gateway, "total": len(running), "requests": rows_json(rows)}
        return json_response(body)

    async def cancel(
        self, request: Request, request_id: Annotated[str, Path(alias="id", max_length=128)]
    ) -> Response:
        """End the requests with this id, here and at their engines. Their clients get status 499.

        Raises:
            RefusedError: none in flight has the id.

        """
        wanted = request_id.encode("ascii", "replace")
        contexts = [
            context
            for context in self.source.running()
            if context.http_request.request_id == wanted
        ]
        cancelled = sum(self.source.cancel(context) for context in contexts)
        if not cancelled:
            message = f"No request in flight at this gateway has the id '{request_id}'; `fleetctl routes --in-flight` lists them."
            raise RefusedError(Refusal(status=404, message=message, code="request_not_found"))
        principal = principal_of(request)
        by = None if principal is None else principal.name
        log.info(
            "request cancelled", extra={"request_id": request_id, "user": by, "count": cancelled}
        )
        body = {"gateway": self.gateway, "id": request_id, "cancelled": cancelled}
        return json_response(body)


async def describe_all(
    shown: Iterable[RequestContext], links: EngineLinks | None, clock: Clock
) -> list[RunningRequest]:
    """Return requests as they are shown, with what their engines tell; engines that do not answer are left out."""
    shown = tuple(shown)
    progress = await _ask_engines(shown, links)
    now_s = clock.monotonic()
    requests = []
    for context in shown:
        endpoint, id_ = endpoint_of(context), context.http_request.request_id.decode("ascii")
        report = None if endpoint is None else progress.get((endpoint.origin, id_))
        requests.append(describe(context, now_s, report))
    return requests


async def _ask_engines(shown: Iterable[RequestContext], links: EngineLinks | None) -> Progress:
    endpoints = {
        endpoint.origin: endpoint
        for context in shown
        if (endpoint := endpoint_of(context)) is not None and endpoint.external is None
    }
    if links is None or not endpoints:
        return {}
    turns = asyncio.Semaphore(_AT_ONCE)
    asked = list(endpoints.values())[:_MOST_ENGINES]
    answers = await asyncio.gather(
        *(_ask(links, engine_endpoint, turns) for engine_endpoint in asked)
    )
    return {
        (endpoint.origin, request.id): request
        for endpoint, answer in zip(asked, answers, strict=True)
        for request in answer.requests
    }


async def _ask(
    links: EngineLinks, endpoint: EngineEndpoint, turns: asyncio.Semaphore
) -> InFlightRequests:
    """Return the requests in flight at an engine; none if it does not answer in time, or something else does."""
    try:
        async with turns, asyncio.timeout(_ANSWER_S):
            status, body = await links.request(
                endpoint.origin, in_flight.ENGINE_PATH, limit=in_flight.MAX_BODY_BYTES
            )
        if status != 200:  # an engine of an older release
            return InFlightRequests()
        return InFlightRequests.model_validate_json(body)
    except (TimeoutError, UnreachableError, BrokenResponseError, ValidationError) as error:
        log.debug(
            "engine does not tell its requests",
            extra={"replica": endpoint.replica, "why": str(error)[:200]},
        )
        return InFlightRequests()
