"""The gateway's own log over HTTP, for who has a ticket from the store: an API key is no such thing."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Header, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from gateway.errors import Refusal, RefusedError, invalid
from machinery import process_log
from machinery.clock import Clock
from machinery.http_server import LogReaders, LogResponse
from machinery.process_log import LogRing, LogSelection
from schemas import duration
from store.tickets import TicketChecker, TicketDenial, TicketGrant

log = logging.getLogger(__name__)

LOG_PATH = "/v1/logs/gateway"


class LogQuery(BaseModel):
    """Which lines are wanted."""

    model_config = ConfigDict(extra="forbid")

    tail: int | None = Field(default=None, ge=0, le=10_000_000)
    """So many from the end; all that are kept if it is left out."""
    since: str = Field(default="", max_length=20)
    """Those of the last so long, such as 5m, by this machine's clock."""
    follow: bool = False
    """Whether to go on with what is logged from now on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLog:
    """What this gateway logged, and who may read it."""

    ring: LogRing
    tickets: TicketChecker
    clock: Clock
    is_stopping: Callable[[], bool]
    """Whether the gateway waits for its clients to end: who follows the log must not hold it up."""
    readers: LogReaders = field(default_factory=LogReaders)

    async def show(
        self,
        query: Annotated[LogQuery, Query()],
        authorization: Annotated[str, Header()] = "",
    ) -> Response:
        """Send the last lines of the gateway's own log."""
        who = await self.tickets.check(authorization)
        if isinstance(who, TicketDenial):
            raise RefusedError(Refusal(status=who.status, message=who.why, code="no_ticket"))
        want = self._want(query)
        if self.readers.is_full:
            message = f"{self.readers.count} logs are being read here already; try again later."
            raise RefusedError(Refusal(status=429, message=message, code="too_many_readers"))
        log.info("a log is read", extra={"of": "gateway", "user": who.user})
        pieces = process_log.stream_ring(
            self.ring, want, self.clock, follow=query.follow, is_over=self._over(who)
        )
        return LogResponse(pieces, self.readers)

    def _over(self, who: TicketGrant) -> Callable[[], Awaitable[bool]]:
        watch = self.tickets.watch(who)

        async def is_over() -> bool:
            return self.is_stopping() or await watch.is_over()

        return is_over

    def _want(self, query: LogQuery) -> LogSelection:
        if not query.since:
            return LogSelection(lines=query.tail)
        try:
            before = timedelta(seconds=duration.parse_fine(query.since))
        except ValueError as error:
            raise invalid(f"{error}.", "since") from None
        return LogSelection(lines=query.tail, since=self.clock.now() - before)


def make_log_router(own: GatewayLog) -> APIRouter:
    """Return the route."""
    router = APIRouter()
    router.add_api_route(LOG_PATH, own.show, methods=["GET"])
    return router
