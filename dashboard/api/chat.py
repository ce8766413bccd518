"""Chat of the page: passes requests on to a gateway of the fleet, and its answers back as they arrive.

A browser may not ask a gateway itself: the page's policy allows no other origin. The API key is the client's own, or the
one that its session began with; the gateway checks it, charges it and limits it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Final

import aiohttp
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from dashboard.auth import read_cookie
from dashboard.sessions import Sessions
from identity.dialer import Dialer, UntrustedAddressError
from insight.fleet_caches import FleetCaches
from machinery.request_body import BodyReader, RequestRefusedError
from schemas.records import GatewayLease
from schemas.wire.errors import Refusal, RefusedError
from store import keys

MAX_CHATS: Final = 64
"""Most answers that are passed on at once."""
_MAX_BODY: Final = 8 << 20
_BODY_S: Final = 30.0
_CONNECT_S: Final = 2.0
_SILENCE_S: Final = 600.0
_REFUSAL_BYTES: Final = 1 << 20
# A route of the routing trace, and what a client must know of an answer.
_PASSED: Final = ("content-type", "retry-after", "warning", "x-request-id")
_PASSED_PREFIX: Final = "x-fleet-"

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ChatRoutes:
    """Handlers of `/chat/v1/...`."""

    caches: FleetCaches
    dialer: Dialer
    sessions: Sessions
    bodies: BodyReader
    chats: int = 0
    """Answers that are passed on now."""

    def add_to(self, router: APIRouter) -> None:
        """Register the routes."""
        router.add_api_route("/chat/v1/models", self.models, methods=["GET"])
        router.add_api_route("/chat/v1/chat/completions", self.chat, methods=["POST"])

    async def models(self, request: Request) -> Response:
        """Return the models that the client's key may use, as a gateway lists them."""
        return await self._forward("GET", "/v1/models", request, b"")

    async def chat(self, request: Request) -> Response:
        """Answer a chat as a gateway does: OpenAI's request, and a response or a stream of events."""
        try:
            body = await self.bodies.read(request)
        except RequestRefusedError as error:
            raise RefusedError(Refusal(status=error.status, message=str(error))) from error
        return await self._forward("POST", "/v1/chat/completions", request, body)

    async def _forward(self, method: str, path: str, request: Request, body: bytes) -> Response:
        """Send the request to the first gateway that accepts a connection."""
        if self.chats >= MAX_CHATS:
            message = f"{self.chats} answers are passed on already; try again soon."
            raise RefusedError(Refusal(status=429, message=message, code="too_many_chats"))
        failed: list[str] = []
        for id_, lease in self._gateways():
            try:
                response = await self._send(
                    id_, lease, (method, path), self._headers(request), body
                )
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                failed.append(f"gateway/{id_} at {lease.url}: {error}")
            except UntrustedAddressError as error:
                failed.append(str(error))
            else:
                log.debug("passed on to a gateway", extra={"gateway": id_, "failed": failed})
                return response
        message = (
            "; ".join(failed) or "no gateway is registered: start fleet-gateway, or `fleetctl up`"
        )
        raise RefusedError(Refusal(status=502, message=message, code="no_gateway"))

    def _headers(self, request: Request) -> dict[str, str]:
        """Return the headers for a gateway: the client's key, or else the one that its session began with."""
        given = request.headers
        own = {name: given[name] for name in ("authorization", "content-type") if name in given}
        cookie = read_cookie(given.get("cookie", "").encode("latin-1"), request.scope)
        secret = self.sessions.secret_of(cookie)
        if secret and "authorization" not in own:
            own["authorization"] = f"Bearer {secret}"
        return own

    def _gateways(self) -> list[tuple[str, GatewayLease]]:
        prefix = keys.GATEWAY_LEASE_PREFIX
        return sorted(
            (key.removeprefix(prefix), lease) for key, lease in self.caches.gateways.items.items()
        )

    async def _send(
        self,
        id_: str,
        lease: GatewayLease,
        wanted: tuple[str, str],
        headers: Mapping[str, str],
        body: bytes,
    ) -> Response:
        """Return a gateway's response; its body follows as it arrives."""
        dial = self.dialer.gateway(id_, lease)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)
        session = aiohttp.ClientSession(timeout=timeout, auto_decompress=False)
        try:
            answer = await session.request(
                wanted[0],
                f"{lease.url}{wanted[1]}",
                data=body or None,
                headers=headers,
                allow_redirects=False,
                ssl=dial.ssl,
                server_hostname=dial.server_hostname,
            )
        except (asyncio.CancelledError, aiohttp.ClientError, OSError):
            await session.close()
            raise
        passed = {
            name.lower(): value
            for name, value in answer.headers.items()
            if name.lower() in _PASSED or name.lower().startswith(_PASSED_PREFIX)
        }
        return StreamingResponse(
            self._pieces(session, answer), status_code=answer.status, headers=passed
        )

    async def _pieces(
        self, session: aiohttp.ClientSession, answer: aiohttp.ClientResponse
    ) -> AsyncIterator[bytes]:
        """Yield the body. If the gateway breaks off, so does the client's connection, and the answer is not taken for complete."""
        self.chats += 1
        try:
            async for piece in answer.content.iter_any():
                yield piece
        finally:
            self.chats -= 1
            answer.close()
            await session.close()


def make_chat(caches: FleetCaches, dialer: Dialer, sessions: Sessions) -> ChatRoutes:
    """Return the routes; a body has 8 MiB and 30 seconds."""
    bodies = BodyReader(limit_bytes=_MAX_BODY, limit_s=_BODY_S, at_once=16)
    return ChatRoutes(caches, dialer, sessions, bodies)
