"""The routes of an agent's API. What is nobody else's business needs a ticket (store/tickets.py).

`/health` and `/metrics` are open: they tell numbers and names of replicas, and nothing that a client wrote.

The agent's API as a part of the agent: where it listens, and what the node's status says of it.
"""

import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated

import orjson
from fastapi import FastAPI, Header, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from machinery import process_log, prometheus
from machinery.clock import Clock
from machinery.http_server import AdminServer, LogReaders, LogResponse
from machinery.process_log import LogSelection
from machinery.version import version
from nodeagent.api import machine_metrics
from nodeagent.api.machine_metrics import AgentView
from nodeagent.engines import engine_logs
from schemas import duration
from schemas.meta import NAME_PATTERN, Condition, ConditionStatus, with_condition
from schemas.node import NodeStatus
from store.port import Transport
from store.tickets import TicketChecker, TicketDenial, TicketGrant

log = logging.getLogger(__name__)

_MAX_LOG_LINES = 10_000_000


class AgentLogQuery(BaseModel):
    """Which lines of a log are wanted."""

    model_config = ConfigDict(extra="forbid")

    tail: int | None = Field(default=None, ge=0, le=_MAX_LOG_LINES)
    """So many from the end; all of them if it is left out."""
    since: str = Field(default="", max_length=20)
    """Those of the last so long, such as 5m, by this machine's clock."""
    follow: bool = False
    """Whether to go on with what is logged from now on."""


class EngineLogQuery(AgentLogQuery):
    """Which lines of which run of an engine."""

    rank: int | None = Field(default=None, ge=0)
    """Refused where this node has another rank of the replica."""
    previous: bool = False
    """The run before the last."""


ReplicaNameParam = Annotated[str, Path(pattern=NAME_PATTERN, max_length=128)]
AuthorizationHeader = Annotated[str, Header()]


class RequestRefusedError(Exception):
    """A request that is answered with a refusal."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def make_app(view: AgentView, tickets: TicketChecker) -> FastAPI:
    """Return the FastAPI application."""
    app = FastAPI(title="mlx-fleet agent", docs_url=None, redoc_url=None, openapi_url=None)
    app.router.redirect_slashes = False
    routes = AgentRoutes(view, tickets)
    for path, answer in (
        ("/health", routes.health),
        ("/metrics", routes.metrics),
        ("/v1/vitals", routes.vitals),
        ("/v1/logs/agent", routes.agent_log),
        ("/v1/logs/replicas/{replica}", routes.replica_log),
    ):
        app.add_api_route(path, answer, methods=["GET"])
    app.add_exception_handler(RequestRefusedError, on_refused)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid_query)
    return app


async def on_refused(_: Request, error: Exception) -> Response:
    """Answer what a route refuses."""
    assert isinstance(error, RequestRefusedError)
    return refusal_response(error.status, str(error))


async def on_http_error(request: Request, error: Exception) -> Response:
    """Answer a wrong path or method."""
    assert isinstance(error, HTTPException)
    return refusal_response(
        error.status_code, f"{error.detail}: {request.method} {request.url.path[:200]}"
    )


async def on_invalid_query(_: Request, error: Exception) -> Response:
    """Answer a query whose values are none that the route takes."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return refusal_response(400, f"'{first['loc'][-1]}': {first['msg']}")


def refusal_response(status: int, message: str) -> Response:
    """Return a refusal in the shape that all our processes have."""
    body = {"error": {"message": message, "type": "refused", "param": None, "code": None}}
    headers = {"www-authenticate": "Bearer"} if status == 401 else {}
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


@dataclass(frozen=True, slots=True)
class AgentRoutes:
    """One method a route."""

    view: AgentView
    tickets: TicketChecker
    readers: LogReaders = field(default_factory=LogReaders)

    async def health(self) -> Response:
        """Say that the agent is there; `leaseHeld` whether the fleet knows."""
        view = self.view
        return _json_response(
            {
                "status": "ok",
                "node": view.name,
                "uid": view.status.uid,
                "version": version(),
                "uptimeSeconds": round(view.uptime_s(), 3),
                "leaseHeld": view.has_lease(),
                "engines": len(view.engines),
            }
        )

    async def metrics(self) -> Response:
        """Show figures in Prometheus' text form."""
        text = prometheus.render(machine_metrics.metric_families(self.view))
        return Response(text, media_type=prometheus.CONTENT_TYPE)

    async def vitals(self, authorization: AuthorizationHeader = "") -> Response:
        """Show the machine's memory and what every rank does."""
        await self._admitted(authorization)
        return _json_response(await machine_metrics.machine_vitals(self.view))

    async def agent_log(
        self, query: Annotated[AgentLogQuery, Query()], authorization: AuthorizationHeader = ""
    ) -> Response:
        """Send the last lines of the agent's own log."""
        who = await self._admitted(authorization)
        self._note("agent", who)
        pieces = process_log.stream_ring(
            self.view.ring,
            self._want(query),
            self.view.clock,
            follow=query.follow,
            is_over=self.tickets.watch(who).is_over,
        )
        return self._sent(pieces)

    async def replica_log(
        self,
        replica: ReplicaNameParam,
        query: Annotated[EngineLogQuery, Query()],
        authorization: AuthorizationHeader = "",
    ) -> Response:
        """Send the log of the replica's engine on this node: of its last run, or the one before it."""
        who = await self._admitted(authorization)
        if query.previous and query.follow:
            raise RequestRefusedError(
                400, "'follow': the previous run is over; ask for one of the two"
            )
        rank, here = query.rank, self.view.rank_of(replica)
        if None not in (rank, here) and rank != here:
            raise RequestRefusedError(
                404,
                f"rank {rank} of replica {replica} is not on {self.view.name}, which has rank {here}",
            )
        folder = self.view.folder / replica
        run = engine_logs.find_run(folder, previous=query.previous)
        if run is None or not (folder / run.file).exists():
            raise RequestRefusedError(404, self._no_run(replica, previous=query.previous))
        self._note(f"replica/{replica}", who)
        pieces = engine_logs.stream_run(
            folder / run.file,
            run,
            self._want(query),
            self.view.clock,
            follow=query.follow,
            is_over=self.tickets.watch(who).is_over,
        )
        return self._sent(pieces)

    def _no_run(self, replica: str, *, previous: bool) -> str:
        there = engine_logs.find_run(self.view.folder / replica, previous=False)
        if previous and there is not None:
            return (
                f"replica {replica} was started once on {self.view.name}: there is no previous run"
            )
        return f"no engine of replica {replica} was ever started on {self.view.name}"

    def _want(self, query: AgentLogQuery) -> LogSelection:
        try:
            before_s = duration.parse_fine(query.since) if query.since else None
        except ValueError as error:
            raise RequestRefusedError(400, f"'since': {error}") from None
        now = self.view.clock.now()
        return LogSelection(
            lines=query.tail, since=None if before_s is None else now - timedelta(seconds=before_s)
        )

    async def _admitted(self, authorization: str) -> TicketGrant:
        found = await self.tickets.check(authorization)
        if isinstance(found, TicketDenial):
            raise RequestRefusedError(found.status, f"{self.view.name}: {found.why}")
        return found

    def _note(self, what: str, who: TicketGrant) -> None:
        log.info("a log is read", extra={"of": what, "user": who.user})

    def _sent(self, pieces: AsyncIterator[bytes]) -> LogResponse:
        if self.readers.is_full:
            raise RequestRefusedError(
                429, f"{self.readers.count} logs are being read here already; try again later"
            )
        return LogResponse(pieces, self.readers)


def _json_response(body: machine_metrics.Json) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")


API_SERVING = "ApiServing"


class AgentApi:
    """The API of one agent."""

    def __init__(
        self, view: AgentView, transport: Transport, *, port: int, on_change: Callable[[], None]
    ) -> None:
        self._clock: Clock = view.clock
        tickets = TicketChecker(transport, view.clock, f"Node/{view.name}")
        self._door = AdminServer(
            make_app(view, tickets),
            view.clock,
            (view.host, port),
            self._noted(on_change),
        )
        self._condition: Condition | None = None

    def _noted(self, on_change: Callable[[], None]) -> Callable[[], None]:
        def changed() -> None:
            self._condition = self._judged()
            on_change()

        return changed

    def _judged(self) -> Condition | None:
        """Return what keeps it from answering; None while nothing does."""
        if not self._door.why:
            return None
        return Condition(
            type=API_SERVING,
            status=ConditionStatus.FALSE,
            reason="PortTaken",
            message=f"{self._door.why}. Models are served all the same; for logs and figures start the agent with "
            "another --api-port, or end who listens there",
            last_transition_time=self._clock.now(),
        )

    async def run(self) -> None:
        """Answer for ever."""
        await self._door.run()

    def fill(self, status: NodeStatus) -> NodeStatus:
        """Return the status with where the API answers, or why it does not."""
        conditions = status.conditions
        if self._condition is not None:
            conditions = with_condition(conditions, self._condition)
        return status.model_copy(update={"agent_url": self._door.url, "conditions": conditions})
