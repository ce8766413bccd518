"""Logs of every process of the fleet, passed on as they arrive: filtered, and cut where a page could not keep up."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Annotated, Final

import orjson
from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from identity.dialer import Dialer
from identity.log_access import LogAccess, LogQuery, log_path
from insight import logs
from insight.errors import ProcessError
from insight.fleet_caches import FleetCaches
from insight.logs import LineFilter, LineReader, LogRange, LogSource
from insight.process_client import ProcessAddress
from insight.tickets import issue_ticket
from machinery.clock import Clock
from schemas.wire.errors import invalid, refused
from store.port import Transport

MAX_FOLLOWED: Final = 32
"""Most logs that are read at once."""
_LINES_PER_SECOND: Final = 1000
_MAX_LINE: Final = 64 << 10


class PageLogQuery(BaseModel):
    """Selection of lines of one log."""

    model_config = ConfigDict(extra="forbid")

    of: str = Field(max_length=300)
    """`node/NAME`, `replica/NAME[/RANK]`, `gateway/ID`, `reconciler/ID` or `dashboard/ID`."""
    tail: int = Field(default=200, ge=0, le=10_000)
    """The number of lines from the end."""
    since: str = Field(default="", max_length=20, pattern=r"^(\d+[a-z]+)*$")
    """Maximum age of the lines, such as 5m."""
    grep: str = Field(default="", max_length=200)
    """Text that lines contain, in any case of letters."""
    about: str = Field(default="", max_length=200)
    """An object, a node, a request or a trace that lines name."""
    follow: bool = False
    """True to continue with new lines."""
    previous: bool = False
    """True for the log of the engine before the current one."""


@dataclass(slots=True)
class PageLines:
    """Passes on the wanted lines of a log, so many a second; the others are counted. Pure but for its state."""

    lines: LineReader
    most: int = _LINES_PER_SECOND
    _second: int = 0
    _shown: int = 0
    _left_out: int = 0

    def add(self, piece: bytes, now_s: float) -> bytes:
        """Return the lines of a piece of the log that are shown."""
        found: list[bytes] = []
        for line in self.lines.add(piece):
            found += self._take(line, int(now_s))
        return b"".join(line + b"\n" for line in found)

    def end(self) -> bytes:
        """Return an unterminated last line, and what was left out."""
        return b"".join(line + b"\n" for line in self.lines.end()) + self._note()

    def _take(self, line: bytes, second: int) -> list[bytes]:
        note: list[bytes] = []
        if second != self._second:
            if self._left_out:
                note = [self._note().rstrip(b"\n")]
            self._second, self._shown = second, 0
        if self._shown >= self.most:
            self._left_out += 1
            return note
        self._shown += 1
        return [*note, line]

    def _note(self) -> bytes:
        if not self._left_out:
            return b""
        count, self._left_out = self._left_out, 0
        return (
            b'{"level":"notice","message":"%d lines were left out here: too many a second"}\n'
            % count
        )


@dataclass(slots=True)
class LogRoutes:
    """Handlers of `/api/v1/logs`, and of the dashboard's own log."""

    caches: FleetCaches
    transport: Transport
    dialer: Dialer
    clock: Clock
    own: LogAccess
    open: int = field(default=0)
    """Logs that are read now."""

    def add_to(self, router: APIRouter) -> None:
        """Register the routes."""
        router.add_api_route("/api/v1/logs", self.read, methods=["GET"])
        router.add_api_route(log_path("dashboard"), self.read_own, methods=["GET"])

    async def read_own(
        self,
        query: Annotated[LogQuery, Query()],
        authorization: Annotated[str, Header()] = "",
    ) -> Response:
        """Send the last lines of the dashboard's own log, for a ticket of the store."""
        return await self.own.show(query, authorization)

    async def read(self, query: Annotated[PageLogQuery, Query()]) -> Response:
        """Stream a log as lines."""
        if self.open >= MAX_FOLLOWED:
            message = f"{self.open} logs are read already; close some."
            raise refused(429, message, "too_many_logs")
        try:
            source = logs.known_source(self.caches, query.of, is_previous=query.previous)
            address = logs.known_address(self.caches, source, self.dialer)
        except ValueError as error:
            raise invalid(f"{error}.", "of") from None
        except ProcessError as error:
            message = f"{str(error)[:1].upper()}{str(error)[1:]}."
            raise refused(404, message) from error
        part = LogRange(tail=query.tail, since=query.since, is_followed=query.follow)
        stack = contextlib.AsyncExitStack()
        try:
            pieces = await self._open(stack, address, source, part)
        except BaseException:
            # There is no response whose end would close the connection; the client may have left, too.
            await stack.aclose()
            raise
        wanted = LineFilter(text=query.grep, about=query.about)
        return StreamingResponse(
            self._lines(stack, pieces, PageLines(LineReader(wanted, _MAX_LINE))),
            media_type="text/plain; charset=utf-8",
            headers={"x-accel-buffering": "no"},
        )

    async def _open(
        self,
        stack: contextlib.AsyncExitStack,
        address: ProcessAddress,
        source: LogSource,
        part: LogRange,
    ) -> AsyncIterator[bytes]:
        """Ask the process; what it holds is closed with the stack. Raises RefusedError."""
        try:
            bearer = await stack.enter_async_context(issue_ticket(self.transport, address.key))
            return await stack.enter_async_context(
                logs.open_log(address, source, part, bearer=bearer)
            )
        except ProcessError as error:
            raise refused(502, f"{error}.") from error

    async def _lines(
        self, stack: contextlib.AsyncExitStack, pieces: AsyncIterator[bytes], lines: PageLines
    ) -> AsyncIterator[bytes]:
        self.open += 1
        try:
            async with stack:
                async for piece in pieces:
                    if shown := lines.add(piece, self.clock.monotonic()):
                        yield shown
                yield lines.end()
        except ProcessError as error:
            broken = {"level": "error", "message": "the log broke off", "why": str(error)}
            yield orjson.dumps(broken) + b"\n"
        finally:
            self.open -= 1
