"""The agent's API server: its routes, their authorization, and the condition that says whether it listens.

`/health` and `/metrics` are open on this machine; elsewhere they need an identity of the fleet, a ticket or a token
(identity/metrics_access.py). Files of models need a certificate of a node (nodeagent/api/blobs.py) or, from the mirror,
of an administrator (nodeagent/api/hub_mirror.py), as do stop orders and changes of models
(nodeagent/api/admin_access.py). The other routes need a ticket everywhere (store/tickets.py).
"""

import logging
import platform
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated

import orjson
from fastapi import FastAPI, Header, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from identity.credentials import Credentials
from identity.listeners import ApiSecurity, server_security
from identity.metrics_access import MetricsAccess
from identity.names import Role
from machinery import process_log, prometheus
from machinery.clock import Clock
from machinery.http_server import AdminServer, LogReaders, LogResponse
from machinery.process_log import LogSelection
from machinery.version import version
from nodeagent.api import machine_metrics
from nodeagent.api.admin_access import AdminAccess
from nodeagent.api.machine_doctor import MachineDoctor
from nodeagent.api.machine_metrics import AgentView
from nodeagent.api.model_routes import ModelRoutes
from nodeagent.api.stop_orders import StopRoutes
from nodeagent.engines import engine_logs
from nodeagent.engines.stop_order import StopOrder
from schemas import duration
from schemas.meta import NAME_PATTERN, Condition, ConditionStatus, with_condition
from schemas.node import NodeStatus
from schemas.wire import findings
from schemas.wire.errors import Refusal, RefusedError
from store.port import Transport
from store.tickets import TicketChecker, TicketDenial, TicketGrant

log = logging.getLogger(__name__)

_MAX_LOG_LINES = 10_000_000
_ROLES = frozenset((Role.NODE, Role.GATEWAY, Role.RECONCILER, Role.ADMIN))
"""The roles of clients. A ticket is needed all the same."""


class AgentLogQuery(BaseModel):
    """The query of a log: the lines to return."""

    model_config = ConfigDict(extra="forbid")

    tail: int | None = Field(default=None, ge=0, le=_MAX_LOG_LINES)
    """The number of lines from the end; all if it is missing."""
    since: str = Field(default="", max_length=20)
    """Lines of the last period, such as 5m, by this machine's clock."""
    follow: bool = False
    """True if to continue with later lines."""


class EngineLogQuery(AgentLogQuery):
    """The query of an engine's log: the lines and the run."""

    rank: int | None = Field(default=None, ge=0)
    """Refused if this node has another rank of the replica."""
    previous: bool = False
    """True if to return the run before the last one."""


ReplicaNameParam = Annotated[str, Path(pattern=NAME_PATTERN, max_length=128)]
AuthorizationHeader = Annotated[str, Header()]


def make_app(
    view: AgentView,
    tickets: TicketChecker,
    security: ApiSecurity | None = None,
    credentials: Credentials | None = None,
    doctor: MachineDoctor | None = None,
) -> FastAPI:
    """Return the FastAPI application; without `doctor`, the agent does not examine its machine.

    `credentials` are those of the agent's own identity.
    """
    security = security or ApiSecurity()
    app = FastAPI(title="mlx-fleet agent", docs_url=None, redoc_url=None, openapi_url=None)
    app.router.redirect_slashes = False
    access = MetricsAccess(
        tickets=tickets,
        roles=_ROLES,
        token=security.metrics_token,
        is_open=security.has_open_metrics,
    )
    routes = AgentRoutes(view, tickets, access, doctor)
    for path, answer in (
        ("/health", routes.health),
        ("/metrics", routes.metrics),
        ("/v1/vitals", routes.vitals),
        (findings.PATH, routes.findings),
        ("/v1/logs/agent", routes.agent_log),
        ("/v1/logs/replicas/{replica}", routes.replica_log),
    ):
        app.add_api_route(path, answer, methods=["GET"])
    order = StopOrder(view.folder.parent)
    StopRoutes(
        node=view.name, order=order, tickets=tickets, clock=view.clock, credentials=credentials
    ).add_to(app)
    if view.collector is not None and view.pulls is not None:
        admin = AdminAccess(
            node=view.name, tickets=tickets, credentials=credentials, action="changes its models"
        )
        ModelRoutes(
            collector=view.collector,
            pulls=view.pulls,
            quantizations=view.quantizations,
            access=admin,
        ).add_to(app)
    if view.blobs is not None:
        view.blobs.add_to(app)
    if view.prompts is not None:
        view.prompts.add_to(app)
    if view.mirror is not None:
        view.mirror.add_to(app)
    app.add_exception_handler(RefusedError, on_refused)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid_query)
    return app


def refusal(status: int, message: str) -> Refusal:
    """Return a refusal in the error envelope that all our processes use."""
    extra = ((b"www-authenticate", b"Bearer"),) if status == 401 else ()
    return Refusal(status=status, message=message, type="refused", extra_headers=extra)


def refused(status: int, message: str) -> RefusedError:
    """Return the exception that makes a route answer with a refusal."""
    return RefusedError(refusal(status, message))


def refusal_response(found: Refusal) -> Response:
    """Return the response with a refusal."""
    headers = {name.decode(): value.decode() for name, value in found.headers()}
    return Response(found.body(), found.status, headers)


async def on_refused(_: Request, error: Exception) -> Response:
    """Answer a request that a route refuses."""
    assert isinstance(error, RefusedError)
    return refusal_response(error.refusal)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Answer a request with an unknown path or method."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path[:200]}"
    return refusal_response(refusal(error.status_code, message))


async def on_invalid_query(_: Request, error: Exception) -> Response:
    """Answer a request with an invalid query."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return refusal_response(refusal(400, f"'{first['loc'][-1]}': {first['msg']}"))


@dataclass(frozen=True, slots=True)
class AgentRoutes:
    """One method a route."""

    view: AgentView
    tickets: TicketChecker
    access: MetricsAccess
    doctor: MachineDoctor | None = None
    readers: LogReaders = field(default_factory=LogReaders)

    async def health(self, request: Request) -> Response:
        """Answer that the agent runs.

        `leaseHeld` says whether the fleet counts the node as alive; etcd renews leases of agents that it refuses, so
        `store` says whether the agent can read.
        """
        await self._check_reader(request)
        view = self.view
        return _json_response(
            {
                "status": "ok",
                "node": view.name,
                "uid": view.status.uid,
                "version": version(),
                "python": platform.python_version(),
                "uptimeSeconds": round(view.uptime_s(), 3),
                "leaseHeld": view.has_lease(),
                "engines": len(view.engines),
                **view.store_view().fields(),
            }
        )

    async def metrics(self, request: Request) -> Response:
        """Answer with the metrics in Prometheus' text format."""
        await self._check_reader(request)
        text = prometheus.render(machine_metrics.metric_families(self.view))
        return Response(text, media_type=prometheus.CONTENT_TYPE)

    async def vitals(self, authorization: AuthorizationHeader = "") -> Response:
        """Answer with the machine's memory and the metrics of every rank."""
        await self._authorize(authorization)
        return _json_response(await machine_metrics.machine_vitals(self.view))

    async def findings(self, authorization: AuthorizationHeader = "") -> Response:
        """Answer with the findings about this machine (`fleetctl doctor`)."""
        grant = await self._authorize(authorization)
        if self.doctor is None:
            raise refused(404, f"{self.view.name}: this agent does not examine its machine")
        log.info("the machine is examined", extra={"user": grant.user})
        return Response(await self.doctor.document(), media_type="application/json")

    async def agent_log(
        self, query: Annotated[AgentLogQuery, Query()], authorization: AuthorizationHeader = ""
    ) -> Response:
        """Stream the agent's own log."""
        grant = await self._authorize(authorization)
        self._log_reader("agent", grant)
        pieces = process_log.stream_ring(
            self.view.ring,
            self._selection(query),
            self.view.clock,
            follow=query.follow,
            is_over=self.tickets.watch(grant).is_over,
        )
        return self._log_response(pieces)

    async def replica_log(
        self,
        replica: ReplicaNameParam,
        query: Annotated[EngineLogQuery, Query()],
        authorization: AuthorizationHeader = "",
    ) -> Response:
        """Stream the log of the replica's engine on this node: of its last run, or of the one before."""
        grant = await self._authorize(authorization)
        if query.previous and query.follow:
            raise refused(
                400, "'follow': the previous run is over; use either 'follow' or 'previous'"
            )
        rank, here = query.rank, self.view.rank_of(replica)
        if None not in (rank, here) and rank != here:
            raise refused(
                404,
                f"rank {rank} of replica {replica} is not on {self.view.name}, which has rank {here}",
            )
        folder = self.view.folder / replica
        run = engine_logs.find_run(folder, previous=query.previous)
        if run is None or not (folder / run.file).exists():
            raise refused(404, self._no_run(replica, previous=query.previous))
        self._log_reader(f"replica/{replica}", grant)
        pieces = engine_logs.stream_run(
            folder / run.file,
            run,
            self._selection(query),
            self.view.clock,
            follow=query.follow,
            is_over=self.tickets.watch(grant).is_over,
        )
        return self._log_response(pieces)

    def _no_run(self, replica: str, *, previous: bool) -> str:
        there = engine_logs.find_run(self.view.folder / replica, previous=False)
        if previous and there is not None:
            return (
                f"replica {replica} was started once on {self.view.name}: there is no previous run"
            )
        return f"no engine of replica {replica} was started on {self.view.name}"

    def _selection(self, query: AgentLogQuery) -> LogSelection:
        try:
            before_s = duration.parse(query.since) if query.since else None
        except ValueError as error:
            raise refused(400, f"'since': {error}") from None
        now = self.view.clock.now()
        return LogSelection(
            lines=query.tail, since=None if before_s is None else now - timedelta(seconds=before_s)
        )

    async def _check_reader(self, request: Request) -> None:
        """Refuse a client that may not read metrics."""
        denial = await self.access.denial(request.scope)
        if denial is not None:
            raise refused(denial.status, f"{self.view.name}: {denial.message}")

    async def _authorize(self, authorization: str) -> TicketGrant:
        ticket_grant = await self.tickets.check(authorization)
        if isinstance(ticket_grant, TicketDenial):
            raise refused(ticket_grant.status, f"{self.view.name}: {ticket_grant.why}")
        return ticket_grant

    def _log_reader(self, what: str, grant: TicketGrant) -> None:
        log.info("a log is read", extra={"of": what, "user": grant.user})

    def _log_response(self, pieces: AsyncIterator[bytes]) -> LogResponse:
        if self.readers.is_full:
            raise refused(
                429,
                f"{self.readers.count} logs are being read on this node already; try again later",
            )
        return LogResponse(pieces, self.readers)


def _json_response(body: machine_metrics.Json) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")


API_SERVING = "ApiServing"


class AgentApi:
    """The API of one agent."""

    def __init__(
        self,
        view: AgentView,
        transport: Transport,
        *,
        port: int,
        on_change: Callable[[], None],
        security: ApiSecurity,
        credentials: Credentials | None,
    ) -> None:
        """`port`: 0 for any."""
        self._clock: Clock = view.clock
        tickets = TicketChecker(transport, view.clock, f"Node/{view.name}")
        doctor = None if view.scope is None else MachineDoctor(view, view.scope, transport)
        self._server = AdminServer(
            make_app(view, tickets, security, credentials, doctor),
            view.clock,
            (view.status.address, port),
            self._on_server_change(on_change),
            security=server_security(credentials, _ROLES, is_insecure=security.is_insecure),
        )
        self._condition: Condition | None = None
        if credentials is not None:
            # The fleet's mode is in the URL.
            credentials.on_change(on_change)

    def _on_server_change(self, on_change: Callable[[], None]) -> Callable[[], None]:
        def changed() -> None:
            self._condition = self._serving_condition()
            on_change()

        return changed

    def _serving_condition(self) -> Condition | None:
        """Return the condition that says why the API does not listen; None while it does."""
        if not self._server.error:
            return None
        if self._server.is_refused:
            return Condition(
                type=API_SERVING,
                status=ConditionStatus.FALSE,
                reason="IdentityRequired",
                message=f"{self._server.error}. Models are served all the same; logs and metrics are not",
                last_transition_time=self._clock.now(),
            )
        return Condition(
            type=API_SERVING,
            status=ConditionStatus.FALSE,
            reason="PortTaken",
            message=f"{self._server.error}. Models are served all the same. For logs and metrics, start the agent with "
            "another --api-port, or stop the process that uses the port",
            last_transition_time=self._clock.now(),
        )

    @property
    def tls_url(self) -> str:
        """The URL for peers with an identity, whatever the fleet's TLS mode is; "" while it does not listen."""
        _, colon, rest = self._server.url.partition(":")
        return colon and f"https:{rest}"

    async def run(self) -> None:
        """Serve forever."""
        await self._server.run()

    def fill(self, status: NodeStatus) -> NodeStatus:
        """Return the status with the URL of the API, or the condition that says why there is none."""
        conditions = status.conditions
        if self._condition is not None:
            conditions = with_condition(conditions, self._condition)
        return status.model_copy(update={"agent_url": self._server.url, "conditions": conditions})
