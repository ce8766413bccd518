"""Cross-origin requests (CORS): the allowed origins and the ASGI middleware that answers preflights.

Cookies and other credentials that browsers add by themselves are not supported and therefore not
allowed.
"""

import re
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import errors
from gateway.request import RawHeaders
from schemas.wire import headers as wire_headers
from schemas.wire.errors import Refusal

ANY = "*"
# Pages served by this machine, as Ollama allows. Not every page: a gateway without keys listens on
# loopback, and any site that its owner visits could use it.
_OF_THIS_MACHINE = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?")
# The form scheme://host[:port] that browsers send; some apps have schemes of their own.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@,]*|null")
_METHODS = b"GET, POST, PUT, PATCH, DELETE, OPTIONS"
# Chrome caches preflight answers for 2 h at most.
_REMEMBERED_S = b"7200"
_EXPOSED = ", ".join(
    (
        wire_headers.RETRY_AFTER,
        wire_headers.REQUEST_ID,
        wire_headers.NODE,
        wire_headers.REPLICA,
        wire_headers.ATTEMPTS,
        wire_headers.STORE,
        *sorted((*wire_headers.RATE_LIMIT_REQUESTS, *wire_headers.RATE_LIMIT_TOKENS)),
    )
).encode()


class AllowedOrigins:
    """The origins that may use the gateway: this machine's, and the configured ones."""

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        """Allow these origins too, in the form that browsers send, or "*" for all.

        Raises:
            ValueError: an entry is not an origin.

        """
        for origin in allowed:
            if origin != ANY and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is no origin; write scheme://host[:port] without a path, such as "
                    "https://chat.example.com, or * for every page"
                )
        self._is_any = ANY in allowed
        self._allowed = frozenset(allowed)

    def allows(self, origin: bytes) -> bool:
        """Return whether a page of this origin may use the gateway.

        A request without an origin is not from a page.
        """
        if not origin or self._is_any:
            return True
        name = origin.decode("latin-1").lower()
        return name in self._allowed or _OF_THIS_MACHINE.fullmatch(name) is not None

    def headers(self, origin: bytes) -> RawHeaders:
        """Return the CORS headers of a response; empty if the origin is missing or not allowed."""
        if not origin or not self.allows(origin):
            return ()
        return (
            (b"access-control-allow-origin", b"*" if self._is_any else origin),
            (b"access-control-expose-headers", _EXPOSED),
            (b"vary", b"origin"),
        )

    def preflight(self, wanted: bytes) -> RawHeaders:
        """Return the headers that answer a preflight request."""
        return (
            (b"access-control-allow-methods", _METHODS),
            # Not "*", which does not include authorization.
            (b"access-control-allow-headers", wanted or b"authorization, content-type"),
            (b"access-control-max-age", _REMEMBERED_S),
        )


class CorsMiddleware:
    """ASGI middleware for cross-origin requests."""

    def __init__(self, app: ASGIApp, origins: AllowedOrigins) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer preflights and refuse origins that are not allowed; pass everything else on."""
        request_headers: dict[bytes, bytes] = dict(scope["headers"])
        origin = request_headers.get(b"origin", b"")
        if not origin:
            await self._app(scope, receive, send)
            return
        if not self._origins.allows(origin):
            await _send_refusal(errors.wrong_origin(origin.decode("latin-1")), send)
            return
        cors_headers = self._origins.headers(origin)
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in request_headers:
            wanted_headers = request_headers.get(b"access-control-request-headers", b"")
            await _send_response(
                204, [*cors_headers, *self._origins.preflight(wanted_headers)], b"", send
            )
            return

        async def send_with_cors(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *cors_headers]
            await send(message)

        await self._app(scope, receive, send_with_cors)


async def _send_refusal(refusal: Refusal, send: Send) -> None:
    body = refusal.body()
    headers = [*refusal.headers(), (b"content-length", b"%d" % len(body))]
    await _send_response(refusal.status, headers, body, send)


async def _send_response(status: int, headers: list[Any], body: bytes, send: Send) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
