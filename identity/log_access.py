"""A process's own log over HTTP. Readers need a ticket from the store; neither API keys nor certificates are accepted."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta

from pydantic import BaseModel, ConfigDict, Field

from machinery import process_log
from machinery.clock import Clock
from machinery.http_server import LogReaders, LogResponse
from machinery.process_log import LogRing, LogSelection
from schemas import duration
from schemas.wire.errors import Refusal, RefusedError, invalid
from store.tickets import TicketChecker, TicketDenial, TicketGrant

log = logging.getLogger(__name__)


def log_path(process: str) -> str:
    """Return the path of the own log of a process: `gateway`, `reconciler`, `dashboard`, or `agent`."""
    return f"/v1/logs/{process}"


class LogQuery(BaseModel):
    """Selection of log lines."""

    model_config = ConfigDict(extra="forbid")

    tail: int | None = Field(default=None, ge=0, le=10_000_000)
    """The number of lines from the end; all if missing."""
    since: str = Field(default="", max_length=20)
    """Maximum age of the lines, such as 5m, by this machine's clock."""
    follow: bool = False
    """True to continue with new lines."""


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class LogAccess:
    """The log of this process and the check of its readers."""

    process: str
    """The word for the process in its log, such as `gateway`."""
    ring: LogRing
    tickets: TicketChecker
    clock: Clock
    is_stopping: Callable[[], bool] = _never
    """True while the process drains: a follower of the log must not delay it."""
    readers: LogReaders = field(default_factory=LogReaders)

    async def show(self, query: LogQuery, authorization: str) -> LogResponse:
        """Send the selected lines. Raises RefusedError."""
        grant = await self.tickets.check(authorization)
        if isinstance(grant, TicketDenial):
            raise RefusedError(Refusal(status=grant.status, message=grant.why, code="no_ticket"))
        want = self._want(query)
        if self.readers.is_full:
            message = (
                f"{self.readers.count} clients are reading logs here already; try again later."
            )
            raise RefusedError(Refusal(status=429, message=message, code="too_many_readers"))
        log.info("a log is read", extra={"of": self.process, "user": grant.user})
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
            before = timedelta(seconds=duration.parse(query.since))
        except ValueError as error:
            raise invalid(f"{error}.", "since") from None
        return LogSelection(lines=query.tail, since=self.clock.now() - before)
