"""The gateway's own log over HTTP. Readers need a ticket from the store; API keys are not accepted."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Header, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from machinery import process_log
from machinery.clock import Clock
from machinery.http_server import LogReaders, LogResponse
from machinery.process_log import LogRing, LogSelection
from schemas import duration
from schemas.wire.errors import Refusal, RefusedError, invalid
from store.tickets import TicketChecker, TicketDenial, TicketGrant

log = logging.getLogger(__name__)

LOG_PATH = "/v1/logs/gateway"


class LogQuery(BaseModel):
    """Selection of log lines."""

    model_config = ConfigDict(extra="forbid")

    tail: int | None = Field(default=None, ge=0, le=10_000_000)
    """The number of lines from the end; all if missing."""
    since: str = Field(default="", max_length=20)
    """Maximum age of the lines, such as 5m, by this machine's clock."""
    follow: bool = False
    """True to continue with new lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLog:
    """The log of this gateway and the check of its readers."""

    ring: LogRing
    tickets: TicketChecker
    clock: Clock
    is_stopping: Callable[[], bool]
    """True while the gateway drains: a follower of the log must not delay it."""
    readers: LogReaders = field(default_factory=LogReaders)

    async def show(
        self,
        query: Annotated[LogQuery, Query()],
        authorization: Annotated[str, Header()] = "",
    ) -> Response:
        """Send the last lines of the gateway's own log."""
        grant = await self.tickets.check(authorization)
        if isinstance(grant, TicketDenial):
            raise RefusedError(Refusal(status=grant.status, message=grant.why, code="no_ticket"))
        want = self._want(query)
        if self.readers.is_full:
            message = (
                f"{self.readers.count} clients are reading logs here already; try again later."
            )
            raise RefusedError(Refusal(status=429, message=message, code="too_many_readers"))
        log.info("a log is read", extra={"of": "gateway", "user": grant.user})
        pieces = process_log.stream_ring(
            self.ring, want, self.clock, follow=query.follow, is_over=self._over(grant)
        )
        return LogResponse(pieces, self.readers)

    def _over(self, grant: TicketGrant) -> Callable[[], Awaitable[bool]]:
        watch = self.tickets.watch(grant)

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
    """Return the router of the log route."""
    router = APIRouter()
    router.add_api_route(LOG_PATH, own.show, methods=["GET"])
    return router
