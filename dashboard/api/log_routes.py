"""Logs of agents, engines, gateways and reconcilers, passed on as they arrive: filtered, and cut where a page could not keep up."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Annotated, Final

import aiohttp
from fastapi import APIRouter, Query, Response
from fastapi.responses import StreamingResponse

from identity.dialer import Dial, Dialer, UntrustedAddressError
from insight.fleet_caches import FleetCaches
from insight.tickets import issue_ticket
from machinery.clock import Clock
from machinery.http_body import read_limited
from schemas.node import NodeStatus
from schemas.replica import Replica
from schemas.wire.errors import ErrorBody, Refusal, RefusedError, invalid
from store import keys
from store.errors import StoreError
from store.port import Transport

MAX_FOLLOWED: Final = 32
"""Most logs that are read at once."""
_CONNECT_S: Final = 3.0
_LINES_PER_SECOND: Final = 1000
_MAX_LINE: Final = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSource:
    """The place of one log."""

    holder: str
    """The process that has it, as tickets name it: `Node/NAME`, `Gateway/ID` or `Reconciler/ID`."""
    url: str
    dial: Dial


@dataclass(slots=True)
class LineFilter:
    """Keeps the lines with a text, so many a second; the others are counted. Pure but for its state."""

    text: str
    most: int = _LINES_PER_SECOND
    _rest: bytes = b""
    _second: int = 0
    _shown: int = 0
    _left_out: int = 0

    def add(self, piece: bytes, now_s: float) -> bytes:
        """Return the lines of a piece of the log that are shown."""
        *whole, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > _MAX_LINE:
            whole, self._rest = [*whole, self._rest], b""
        wanted = self.text.lower().encode()
        found: list[bytes] = []
        for line in whole:
            if wanted and wanted not in line.lower():
                continue
            found += self._take(line[:_MAX_LINE], int(now_s))
        return b"".join(line + b"\n" for line in found)

    def end(self) -> bytes:
        """Return an unterminated last line, and what was left out."""
        rest, self._rest = self._rest, b""
        is_shown = rest and self.text.lower().encode() in rest.lower()
        return (rest + b"\n" if is_shown else b"") + self._note()

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
    """Handler of `/api/v1/logs`."""

    caches: FleetCaches
    transport: Transport
    dialer: Dialer
    clock: Clock
    open: int = field(default=0)
    """Logs that are read now."""

    def add_to(self, router: APIRouter) -> None:
        """Register the route."""
        router.add_api_route("/api/v1/logs", self.read, methods=["GET"])

    async def read(
        self,
        of: Annotated[str, Query(max_length=300)],
        tail: Annotated[int, Query(ge=0, le=10_000)] = 200,
        grep: Annotated[str, Query(max_length=200)] = "",
        *,
        follow: bool = False,
        previous: bool = False,
    ) -> Response:
        """Stream a log as lines. `of`: node/NAME, replica/NAME (also replica/NAME/RANK), gateway/ID or reconciler/ID."""
        if self.open >= MAX_FOLLOWED:
            message = f"{self.open} logs are read already; close some."
            raise RefusedError(Refusal(status=429, message=message, code="too_many_logs"))
        source = self._source(of)
        params = {"tail": str(tail), "follow": str(follow).lower()}
        if previous:
            params["previous"] = "true"
        stack = contextlib.AsyncExitStack()
        try:
            answer = await self._open(stack, source, params)
        except BaseException:
            # There is no response whose end would close the connection; the client may have left, too.
            await stack.aclose()
            raise
        return StreamingResponse(
            self._lines(stack, answer, LineFilter(grep)),
            media_type="text/plain; charset=utf-8",
            headers={"x-accel-buffering": "no"},
        )

    async def _open(
        self, stack: contextlib.AsyncExitStack, source: LogSource, params: dict[str, str]
    ) -> aiohttp.ClientResponse:
        """Ask the process; what it holds is closed with the stack. Raises RefusedError."""
        try:
            bearer = await stack.enter_async_context(issue_ticket(self.transport, source.holder))
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
            session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
            answer = await stack.enter_async_context(
                session.get(
                    source.url,
                    params=params,
                    headers={"authorization": f"Bearer {bearer}"},
                    allow_redirects=False,
                    ssl=source.dial.ssl,
                    server_hostname=source.dial.server_hostname,
                )
            )
        except StoreError as error:
            message = f"A log needs a ticket in the store, which does not answer: {error}."
            raise RefusedError(Refusal(status=503, message=message)) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            message = f"{source.holder} does not answer at {source.url}: {error}."
            raise RefusedError(Refusal(status=502, message=message)) from error
        if answer.status != 200:
            refused = ErrorBody.parse(await read_limited(answer.content.iter_any(), 4096))
            why = "" if refused is None else refused.message
            raise RefusedError(Refusal(status=502, message=f"{source.holder}: {why}"))
        return answer

    async def _lines(
        self, stack: contextlib.AsyncExitStack, answer: aiohttp.ClientResponse, lines: LineFilter
    ) -> AsyncIterator[bytes]:
        self.open += 1
        try:
            async with stack:
                async for piece in answer.content.iter_any():
                    if shown := lines.add(piece, self.clock.monotonic()):
                        yield shown
                yield lines.end()
        except (aiohttp.ClientError, OSError) as error:
            yield b'{"level":"error","message":"the log broke off: %s"}\n' % str(error).encode()
        finally:
            self.open -= 1

    def _source(self, of: str) -> LogSource:
        """Return the place of a log. Raises RefusedError."""
        kind, _, name = of.partition("/")
        if kind == "gateway" and name:
            return self._of_gateway(name)
        if kind == "reconciler" and name:
            return self._of_reconciler(name)
        if kind == "node" and name:
            return self._of_node(name, "/v1/logs/agent")
        if kind == "replica" and name:
            name, _, rank = name.partition("/")
            found = self.caches.objects.specs.items.get(keys.spec_key("Replica", name))
            number = int(rank) if rank.isdecimal() and len(rank) < 6 else 0
            if not isinstance(found, Replica) or number >= len(found.spec.ranks):
                raise _missing(of)
            path = f"/v1/logs/replicas/{name}"
            return self._of_node(found.spec.ranks[number].node, path)
        raise invalid(
            f"'{of[:100]}' is not node/NAME, replica/NAME, gateway/ID or reconciler/ID.", "of"
        )

    def _of_node(self, name: str, path: str) -> LogSource:
        objects = self.caches.objects
        status = objects.statuses.items.get(keys.status_key("Node", name))
        url = status.agent_url if isinstance(status, NodeStatus) else ""
        lease = objects.leases.items.get(keys.node_lease_key(name))
        if not url:
            raise _missing(f"node/{name}")
        if self.dialer.has_identity and lease is not None and lease.tls:
            url = url.replace("http:", "https:", 1)
        try:
            dial = self.dialer.node(name, url)
        except UntrustedAddressError as error:
            raise RefusedError(Refusal(status=502, message=str(error))) from error
        return LogSource(holder=f"Node/{name}", url=f"{url.rstrip('/')}{path}", dial=dial)

    def _of_gateway(self, id_: str) -> LogSource:
        lease = self.caches.gateways.items.get(keys.named(keys.GATEWAY_LEASE_PREFIX, id_))
        if lease is None:
            raise _missing(f"gateway/{id_}")
        try:
            dial = self.dialer.gateway(id_, lease)
        except UntrustedAddressError as error:
            raise RefusedError(Refusal(status=502, message=str(error))) from error
        url = f"{lease.url.rstrip('/')}/v1/logs/gateway"
        return LogSource(holder=f"Gateway/{id_}", url=url, dial=dial)

    def _of_reconciler(self, id_: str) -> LogSource:
        lease = self.caches.reconcilers.items.get(keys.named(keys.RECONCILER_LEASE_PREFIX, id_))
        if lease is None or not lease.url:
            raise _missing(f"reconciler/{id_}")
        try:
            dial = self.dialer.reconciler(id_, lease)
        except UntrustedAddressError as error:
            raise RefusedError(Refusal(status=502, message=str(error))) from error
        url = f"{lease.url.rstrip('/')}/v1/logs/reconciler"
        return LogSource(holder=f"Reconciler/{id_}", url=url, dial=dial)


def _missing(of: str) -> RefusedError:
    message = f"There is no {of[:200]} with a log, or not any more."
    return RefusedError(Refusal(status=404, message=message))
