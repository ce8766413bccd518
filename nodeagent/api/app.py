"""The routes of an agent's API. What is nobody else's business needs a ticket (store/auth/tickets.py).

`/health` and `/metrics` are open: they tell numbers and names of replicas, and nothing that a client wrote.
"""

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated

import orjson
from fastapi import FastAPI, Header, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from machinery import exposition, logring
from machinery.loglines import Want
from machinery.logstream import LogStream, Readers
from machinery.version import version
from nodeagent import enginelogs
from nodeagent.api import figures
from nodeagent.api.view import View
from schemas import duration
from schemas.meta import NAME_PATTERN
from store.auth.tickets import Denied, Granted, Tickets

log = logging.getLogger(__name__)

_MOST_LINES = 10_000_000


class LogQuery(BaseModel):
    """Which lines of a log are wanted."""

    model_config = ConfigDict(extra="forbid")

    tail: int | None = Field(default=None, ge=0, le=_MOST_LINES)
    """So many from the end; all of them if it is left out."""
    since: str = Field(default="", max_length=20)
    """Those of the last so long, such as 5m, by this machine's clock."""
    follow: bool = False
    """Whether to go on with what is logged from now on."""


class EngineLogQuery(LogQuery):
    """Which lines of which run of an engine."""

    rank: int | None = Field(default=None, ge=0)
    """Refused where this node has another rank of the replica."""
    previous: bool = False
    """The run before the last."""


Name = Annotated[str, Path(pattern=NAME_PATTERN, max_length=128)]
Authorization = Annotated[str, Header()]


class RefusedError(Exception):
    """A request that is answered with a refusal."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def make_app(view: View, tickets: Tickets) -> FastAPI:
    """Return the FastAPI application."""
    app = FastAPI(title="mlx-fleet agent", docs_url=None, redoc_url=None, openapi_url=None)
    app.router.redirect_slashes = False
    routes = Routes(view, tickets)
    for path, answer in (
        ("/health", routes.health),
        ("/metrics", routes.metrics),
        ("/v1/vitals", routes.vitals),
        ("/v1/logs/agent", routes.agent_log),
        ("/v1/logs/replicas/{replica}", routes.replica_log),
    ):
        app.add_api_route(path, answer, methods=["GET"])
    app.add_exception_handler(RefusedError, on_refused)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_wrong_query)
    return app


async def on_refused(_: Request, error: Exception) -> Response:
    """Answer what a route refuses."""
    assert isinstance(error, RefusedError)
    return refusal(error.status, str(error))


async def on_http_error(request: Request, error: Exception) -> Response:
    """Answer a wrong path or method."""
    assert isinstance(error, HTTPException)
    return refusal(error.status_code, f"{error.detail}: {request.method} {request.url.path[:200]}")


async def on_wrong_query(_: Request, error: Exception) -> Response:
    """Answer a query whose values are none that the route takes."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return refusal(400, f"'{first['loc'][-1]}': {first['msg']}")


def refusal(status: int, message: str) -> Response:
    """Return a refusal in the shape that all our processes have."""
    body = {"error": {"message": message, "type": "refused", "param": None, "code": None}}
    headers = {"www-authenticate": "Bearer"} if status == 401 else {}
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


@dataclass(frozen=True, slots=True)
class Routes:
    """One method a route."""

    view: View
    tickets: Tickets
    readers: Readers = field(default_factory=Readers)

    async def health(self) -> Response:
        """Say that the agent is there; `leaseHeld` whether the fleet knows."""
        view = self.view
        return _json(
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
        text = exposition.text(figures.series(self.view))
        return Response(text, media_type=exposition.CONTENT_TYPE)

    async def vitals(self, authorization: Authorization = "") -> Response:
        """Show the machine's memory and what every rank does."""
        await self._admitted(authorization)
        return _json(await figures.vitals(self.view))

    async def agent_log(
        self, query: Annotated[LogQuery, Query()], authorization: Authorization = ""
    ) -> Response:
        """Send the last lines of the agent's own log."""
        who = await self._admitted(authorization)
        self._note("agent", who)
        pieces = logring.pieces(
            self.view.ring,
            self._want(query),
            self.view.clock,
            follow=query.follow,
            is_over=self.tickets.watch(who).is_over,
        )
        return self._sent(pieces)

    async def replica_log(
        self,
        replica: Name,
        query: Annotated[EngineLogQuery, Query()],
        authorization: Authorization = "",
    ) -> Response:
        """Send the log of the replica's engine on this node: of its last run, or the one before it."""
        who = await self._admitted(authorization)
        if query.previous and query.follow:
            raise RefusedError(400, "'follow': the previous run is over; ask for one of the two")
        rank, here = query.rank, self.view.rank_of(replica)
        if None not in (rank, here) and rank != here:
            raise RefusedError(
                404,
                f"rank {rank} of replica {replica} is not on {self.view.name}, which has rank {here}",
            )
        folder = self.view.folder / replica
        run = enginelogs.run_of(folder, previous=query.previous)
        if run is None or not (folder / run.file).exists():
            raise RefusedError(404, self._no_run(replica, previous=query.previous))
        self._note(f"replica/{replica}", who)
        pieces = enginelogs.pieces(
            folder / run.file,
            run,
            self._want(query),
            self.view.clock,
            follow=query.follow,
            is_over=self.tickets.watch(who).is_over,
        )
        return self._sent(pieces)

    def _no_run(self, replica: str, *, previous: bool) -> str:
        there = enginelogs.run_of(self.view.folder / replica, previous=False)
        if previous and there is not None:
            return (
                f"replica {replica} was started once on {self.view.name}: there is no previous run"
            )
        return f"no engine of replica {replica} was ever started on {self.view.name}"

    def _want(self, query: LogQuery) -> Want:
        try:
            before_s = duration.parse_fine(query.since) if query.since else None
        except ValueError as error:
            raise RefusedError(400, f"'since': {error}") from None
        now = self.view.clock.now()
        return Want(
            lines=query.tail, since=None if before_s is None else now - timedelta(seconds=before_s)
        )

    async def _admitted(self, authorization: str) -> Granted:
        found = await self.tickets.check(authorization)
        if isinstance(found, Denied):
            raise RefusedError(found.status, f"{self.view.name}: {found.why}")
        return found

    def _note(self, what: str, who: Granted) -> None:
        log.info("a log is read", extra={"of": what, "user": who.user})

    def _sent(self, pieces: AsyncIterator[bytes]) -> LogStream:
        if self.readers.is_full:
            raise RefusedError(
                429, f"{self.readers.count} logs are being read here already; try again later"
            )
        return LogStream(pieces, self.readers)


def _json(body: figures.Json) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
