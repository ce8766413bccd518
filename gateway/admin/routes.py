"""Routes of the admin API: models, engines that a request could get, requests that ended, and the feed for recorders.

`in_flight.py` and `request_stream.py` have the routes of requests under way; `gateway/auth/roles.py` has the role that
each route needs. The gateway keeps no place for any reader of the feed: the cursor names the last entry that it has.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final, TypeAlias

from fastapi import APIRouter, Header, Query, Request, Response

from gateway.admin import in_flight
from gateway.admin.admin_context import AdminContext, endpoints_of, queue_counts
from gateway.admin.in_flight import InFlightRoutes, InFlightSource
from gateway.admin.request_stream import STREAM_PATH, RequestStream
from gateway.apis.http_bodies import json_response
from gateway.auth.access_control import principal_of
from gateway.routing.candidates import BackendCandidates, Candidate, list_candidates
from gateway.routing.table import ServedModel
from gateway.telemetry.request_journal import render_entries, rows_json
from identity.log_access import LogQuery
from identity.names import Role
from identity.peers import peer_of
from machinery.http_server import SSL_OBJECT
from schemas.deployment import ModelDeployment
from schemas.wire.errors import Refusal, RefusedError
from schemas.wire.metrics import parse_outcomes
from store.tickets import TicketDenial

Json: TypeAlias = dict[str, object]
LOG_PATH: Final = "/v1/logs/gateway"
_FEED_READERS: Final = frozenset({Role.DASHBOARD, Role.ADMIN})
_MOST_ENDED: Final = 1000
_MOST_RUNNING: Final = 500
_MOST_CANDIDATES: Final = 200
"""Candidates of one backend in an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminRoutes:
    """Route handlers, one method for each route."""

    context: AdminContext
    source: InFlightSource
    """The requests under way, and the connections to their engines."""

    async def info(self, request: Request, model: str = "") -> Response:
        """Describe one model, or all that the client may use."""
        fleet_state, principal = self.context.fleet_state, principal_of(request)
        deployments = fleet_state.table_cache.known().deployments
        if model:
            return json_response(_model_body(fleet_state.find_model(principal, model), deployments))
        models = fleet_state.visible_models(principal)
        return json_response({"data": [_model_body(one, deployments) for one in models]})

    async def candidates(
        self, request: Request, model: Annotated[str, Query(max_length=200)]
    ) -> Response:
        """List the candidates of a model with the parts of their scores, the one that would be chosen first.

        A session or a cached prompt may lead a request elsewhere.

        Raises:
            RefusedError: there is no such model.

        """
        context = self.context
        served_model = context.fleet_state.find_model(principal_of(request), model)
        health = context.load_tracker.health(context.clock.monotonic())
        backends = [_backend_body(backend) for backend in list_candidates(served_model, health)]
        return json_response({"gateway": context.id, "model": model, "backends": backends})

    async def ended(
        self,
        limit: Annotated[int, Query(ge=1, le=_MOST_ENDED)] = 100,
        status: str = "",
        model: str = "",
        node: str = "",
        id: str = "",  # noqa: A002 - the name of the query's parameter
    ) -> Response:
        """Return the last entries of the journal, newest first. `status`: outcomes, separated by commas; `id`: of a request."""
        outcomes = parse_outcomes(status)
        journal = self.context.recorder.journal
        entries = journal.last(limit, outcomes=outcomes, model=model, node=node, id_=id)
        rows = render_entries(entries, self.context.id)
        return json_response({"requests": rows_json(rows), "kept": len(journal)})

    async def feed(
        self,
        request: Request,
        after: Annotated[str, Query(max_length=200)] = "",
        limit: Annotated[int, Query(ge=0, le=_MOST_ENDED)] = _MOST_ENDED,
        authorization: Annotated[str, Header()] = "",
        *,
        progress: bool = False,
    ) -> Response:
        """Return what ended since the cursor `after`, oldest first, and what is under way; for recorders of the fleet.

        `progress`: engines are asked how far they are, too. `lost` is the number of requests that ended after the
        cursor and are gone; if `isComplete` is false and `lost` is 0, their number is unknown.
        """
        await self._check_reader(request, authorization)
        context = self.context
        page = context.recorder.journal.page_after(after, limit)
        running = sorted(self.source.running(), key=lambda one: one.began_s)[:_MOST_RUNNING]
        links = self.source.links if progress else None
        described = await in_flight.describe_all(running, links, context.clock)
        body: Json = {
            "gateway": context.id,
            "uptimeSeconds": round(context.uptime_s(), 1),
            "cursor": page.cursor,
            "isComplete": page.lost == 0,
            "lost": page.lost or 0,
            "requests": rows_json(render_entries(page.entries, context.id)),
            "running": rows_json(described),
            **queue_counts(context),
        }
        return json_response(body)

    async def _check_reader(self, request: Request, authorization: str) -> None:
        """Refuse clients but recorders and administrators of the fleet. Without keys, anyone may read the journal.

        Raises:
            RefusedError: the client has neither a certificate with such a role nor a ticket.

        """
        if not self.context.fleet_state.access.is_on:
            return
        peer = peer_of(request.scope.get("state", {}).get(SSL_OBJECT))
        if peer is not None and peer.identity.role in _FEED_READERS:
            return
        found = await self.context.metrics_access.tickets.check(authorization)
        if isinstance(found, TicketDenial):
            raise RefusedError(Refusal(status=found.status, message=found.why, code="no_ticket"))

    async def log(
        self,
        query: Annotated[LogQuery, Query()],
        authorization: Annotated[str, Header()] = "",
    ) -> Response:
        """Send the last lines of the gateway's own log."""
        return await self.context.log.show(query, authorization)


def _model_body(model: ServedModel, deployments: Mapping[str, ModelDeployment]) -> Json:
    names = dict.fromkeys(name for backend in model.backends for name in backend.deployments)
    model_deployments = [deployments.get(name) for name in names]
    specs = [deployment.spec for deployment in model_deployments if deployment is not None]
    leased = {endpoint for endpoint, is_leased in endpoints_of(model) if is_leased}
    return {
        "id": model.name,
        "created": model.created,
        "deployments": list(names),
        "source": [spec.model.label for spec in specs],
        "contextLength": model.context_length,
        "concurrency": sum(endpoint.concurrency for endpoint in leased),
        "replicasReady": len({endpoint.replica for endpoint in leased}),
        "deviceCount": len({endpoint.node for endpoint in leased}),
    }


def _backend_body(backend: BackendCandidates) -> Json:
    return {
        "deployments": backend.deployments,
        "weight": backend.weight,
        "strategy": backend.strategy,
        "fallback": backend.is_fallback,
        "total": len(backend.candidates),
        "candidates": [
            _candidate_body(candidate) for candidate in backend.candidates[:_MOST_CANDIDATES]
        ],
    }


def _candidate_body(candidate: Candidate) -> Json:
    endpoint = candidate.endpoint
    return {
        "replica": endpoint.replica,
        "worker": endpoint.node,
        "score": None if candidate.score is None else round(candidate.score, 4),
        "parts": {name: round(value, 4) for name, value in candidate.parts.items()},
        "inFlight": candidate.in_flight,
        "othersInFlight": round(candidate.others_in_flight, 3),
        "concurrency": endpoint.concurrency,
        "memoryFree": candidate.headroom,
        "gpuLoad": candidate.gpu_load,
        "leased": candidate.is_leased,
        "ejected": candidate.is_ejected,
    }


def make_admin_router(context: AdminContext, source: InFlightSource) -> APIRouter:
    """Return the router of the admin API."""
    router, routes = APIRouter(), AdminRoutes(context=context, source=source)
    for path, answer, methods in (
        ("/model/info", routes.info, ["GET", "HEAD"]),
        ("/api/requests/ended", routes.ended, ["GET", "HEAD"]),
        ("/api/requests/candidates", routes.candidates, ["GET"]),
        (STREAM_PATH, RequestStream(context=context, running=source.running).show, ["GET"]),
        ("/api/dashboard/feed", routes.feed, ["GET"]),
        (LOG_PATH, routes.log, ["GET"]),
    ):
        router.add_api_route(path, answer, methods=methods)
    InFlightRoutes(gateway=context.id, source=source, clock=context.clock).add_to(router)
    return router
