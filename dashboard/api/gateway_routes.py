"""Routes that gateways answer: the page's chat, requests in flight, the end of one, and the candidates of a model's requests.

A browser may not ask a gateway itself: the page's policy allows no other origin. The API key is the client's own, or the
one that its session began with; the gateway checks it, charges it and limits it, and decides what it may see and end.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Annotated, Any, Final
from urllib.parse import quote

import aiohttp
import orjson
from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from dashboard.api.routes import json_response
from dashboard.auth import read_cookie
from dashboard.sessions import Sessions
from identity.dialer import Dialer, UntrustedAddressError
from insight.fleet_caches import FleetCaches
from machinery.http_body import read_limited
from machinery.request_body import BodyReader
from schemas.records import GatewayLease
from schemas.wire.errors import ErrorBody, RefusedError, refused
from store import keys

MAX_CHATS: Final = 64
"""Most answers that are passed on at once."""
_MAX_BODY: Final = 8 << 20
_BODY_S: Final = 30.0
_CONNECT_S: Final = 2.0
_SILENCE_S: Final = 600.0
# A route of the routing trace, and what a client must know of an answer.
_PASSED: Final = ("content-type", "retry-after", "warning", "x-request-id")
_PASSED_PREFIX: Final = "x-fleet-"
_ANSWER_S: Final = 3.0
_MOST_BYTES: Final = 4 << 20
_MOST_GATEWAYS: Final = 50
_NO_GATEWAY: Final = "no gateway is registered: start fleet-gateway, or `fleetctl up`"

log = logging.getLogger(__name__)


class PassedResponse(StreamingResponse):
    """A gateway's response, whose body follows as it arrives. If the gateway breaks off, so does the client's connection."""

    def __init__(self, answer: aiohttp.ClientResponse, stack: AsyncExitStack) -> None:
        """`stack` is closed when the response has ended, also if the client left before its body began."""
        headers = {
            name.lower(): value
            for name, value in answer.headers.items()
            if name.lower() in _PASSED or name.lower().startswith(_PASSED_PREFIX)
        }
        super().__init__(answer.content.iter_any(), status_code=answer.status, headers=headers)
        self._stack = stack

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        async with self._stack:
            await super().__call__(scope, receive, send)


@dataclass(slots=True)
class GatewayRoutes:
    """Handlers of the routes."""

    caches: FleetCaches
    dialer: Dialer
    sessions: Sessions
    bodies: BodyReader
    chats: int = 0
    """Answers that are passed on now."""

    def add_to(self, router: APIRouter) -> None:
        """Register the routes."""
        for path, answer, method in (
            ("/chat/v1/models", self.models, "GET"),
            ("/chat/v1/chat/completions", self.chat, "POST"),
            ("/api/v1/in-flight", self.list, "GET"),
            ("/api/v1/requests/{gateway}/{id:path}/cancel", self.cancel, "POST"),
            ("/api/v1/explain/route", self.candidates, "GET"),
        ):
            router.add_api_route(path, answer, methods=[method])

    async def models(self, request: Request) -> Response:
        """Return the models that the client's key may use, as a gateway lists them."""
        return await self._forward("GET", "/v1/models", request, b"")

    async def chat(self, request: Request) -> Response:
        """Answer a chat as a gateway does: OpenAI's request, and a response or a stream of events."""
        body = await self.bodies.read(request)
        return await self._forward("POST", "/v1/chat/completions", request, body)

    async def _forward(self, method: str, path: str, request: Request, body: bytes) -> Response:
        """Send the request to the first gateway that accepts a connection."""
        if self.chats >= MAX_CHATS:
            message = f"{self.chats} answers are passed on already; try again soon."
            raise refused(429, message, "too_many_chats")
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)
        async with AsyncExitStack() as stack:
            self.chats += 1
            stack.callback(self._end_chat)
            session = aiohttp.ClientSession(timeout=timeout, auto_decompress=False)
            await stack.enter_async_context(session)
            async with asyncio.TaskGroup() as group:
                headers = self._headers(request, "content-type")
                first = group.create_task(self._first(session, method, path, headers, body))
                disconnect = group.create_task(_disconnect(request))
                await asyncio.wait((first, disconnect), return_when=asyncio.FIRST_COMPLETED)
                first.cancel()
                disconnect.cancel()
            if first.cancelled():
                raise refused(400, "The client left before its answer began.", "client_left")
            if isinstance(answer := first.result(), str):
                raise refused(502, answer, "no_gateway")
            stack.callback(answer.close)
            return PassedResponse(answer, stack.pop_all())

    async def _first(
        self,
        session: aiohttp.ClientSession,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
    ) -> aiohttp.ClientResponse | str:
        """Return the response of the first gateway that accepts a connection; else why there is none."""
        failed: list[str] = []
        for id_, lease in self._gateways():
            try:
                dial = self.dialer.gateway(id_, lease)
                answer = await session.request(
                    method,
                    f"{lease.url}{path}",
                    data=body or None,
                    headers=headers,
                    allow_redirects=False,
                    ssl=dial.ssl,
                    server_hostname=dial.server_hostname,
                )
            except UntrustedAddressError as error:
                failed.append(str(error))
            except (aiohttp.ClientError, OSError) as error:
                failed.append(f"gateway/{id_} at {lease.url}: {error}")
                is_unsent = isinstance(
                    error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError
                )
                if not is_unsent:
                    break
            else:
                log.debug("passed on to a gateway", extra={"gateway": id_, "failed": failed})
                return answer
        return "; ".join(failed) or _NO_GATEWAY

    def _end_chat(self) -> None:
        self.chats -= 1

    def _headers(self, request: Request, *names: str) -> dict[str, str]:
        """Return the client's own key, or else the one that its session began with, and headers of its request."""
        given = request.headers
        own = {name: given[name] for name in ("authorization", *names) if name in given}
        cookie = read_cookie(given.get("cookie", "").encode("latin-1"), request.scope)
        secret = self.sessions.secret_of(cookie)
        if secret and "authorization" not in own:
            own["authorization"] = f"Bearer {secret}"
        return own

    def _gateways(self) -> list[tuple[str, GatewayLease]]:
        """Return the gateways by their ids."""
        prefix = keys.GATEWAY_LEASE_PREFIX
        leases = sorted(self.caches.gateways.items.items())[:_MOST_GATEWAYS]
        return [(key.removeprefix(prefix), lease) for key, lease in leases]

    async def list(self, request: Request) -> Response:
        """List the requests in flight at all gateways, oldest first, with their phase and the progress of their prompts."""
        gateways = self._gateways()
        path = "/api/requests/in-flight"
        answers = await asyncio.gather(
            *(self._ask(request, id_, lease, "GET", path) for id_, lease in gateways),
            return_exceptions=True,
        )
        rows: list[dict[str, Any]] = []
        silent: dict[str, str] = {}
        for (id_, _), answer in zip(gateways, answers, strict=True):
            if isinstance(answer, RefusedError):
                silent[id_] = str(answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                rows += [{"gateway": id_, **row} for row in answer.get("requests", ())]
        rows.sort(key=lambda row: -float(row.get("seconds") or 0.0))
        return json_response({"requests": rows, "gatewaysSilent": silent})

    async def cancel(
        self,
        request: Request,
        gateway: str,
        request_id: Annotated[str, Path(alias="id", max_length=128)],
    ) -> Response:
        """End a request in flight, at its gateway and at its engine."""
        lease = dict(self._gateways()).get(gateway)
        if lease is None:
            raise refused(404, f"There is no gateway '{gateway[:100]}', or not any more.")
        path = f"/api/requests/{quote(request_id, safe='')}/cancel"
        return json_response(await self._ask(request, gateway, lease, "POST", path))

    async def candidates(
        self, request: Request, model: Annotated[str, Query(min_length=1, max_length=200)]
    ) -> Response:
        """List the engines that a request for a model could get now, best first, with the parts of their scores."""
        for id_, lease in self._gateways():
            path = f"/api/requests/candidates?model={quote(model, safe='')}"
            candidates = await self._ask(request, id_, lease, "GET", path)
            return json_response({"gateway": id_, **candidates})
        raise refused(502, f"{_NO_GATEWAY.capitalize()}.", "no_gateway")

    async def _ask(
        self, request: Request, id_: str, lease: GatewayLease, method: str, path: str
    ) -> dict[str, Any]:
        """Return a gateway's answer. Raises RefusedError."""
        try:
            dial = self.dialer.gateway(id_, lease)
            timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.request(
                    method,
                    f"{lease.url.rstrip('/')}{path}",
                    headers=self._headers(request),
                    allow_redirects=False,
                    ssl=dial.ssl,
                    server_hostname=dial.server_hostname,
                ) as answer,
            ):
                body = await read_limited(answer.content.iter_any(), _MOST_BYTES)
        except UntrustedAddressError as error:
            raise refused(502, str(error)) from error
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise refused(502, f"gateway/{id_} does not answer: {error}") from error
        if answer.status != 200:
            refusal = ErrorBody.parse(body)
            why = f"it answers {answer.status}" if refusal is None else refusal.message
            status = answer.status if answer.status in (401, 403, 404) else 502
            raise refused(status, f"gateway/{id_}: {why}")
        try:
            answered = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise refused(502, f"gateway/{id_}: its answer is no JSON") from error
        return answered if isinstance(answered, dict) else {}


async def _disconnect(request: Request) -> None:
    """Wait until the client has left; its body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def make_gateway_routes(caches: FleetCaches, dialer: Dialer, sessions: Sessions) -> GatewayRoutes:
    """Return the routes; a body has 8 MiB and 30 seconds."""
    bodies = BodyReader(limit_bytes=_MAX_BODY, limit_s=_BODY_S, at_once=16)
    return GatewayRoutes(caches, dialer, sessions, bodies)
