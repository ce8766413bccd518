"""Requests of web pages: the allowed origins (CORS) with the ASGI middleware for preflights, and the allowed hosts.

Cookies and other credentials that browsers add by themselves are not supported and therefore not
allowed.
"""

import ipaddress
import re
from collections.abc import Iterable, Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import errors
from gateway.request import RawHeaders
from schemas.wire import headers as wire_headers

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
        wire_headers.CANONICAL,
        wire_headers.STORE,
        *sorted((*wire_headers.RATE_LIMIT_REQUESTS, *wire_headers.RATE_LIMIT_TOKENS)),
        *sorted(
            (*wire_headers.ANTHROPIC_RATE_LIMIT_REQUESTS, *wire_headers.ANTHROPIC_RATE_LIMIT_TOKENS)
        ),
    )
).encode()


# Names of this machine, for clients on it. Any port: forwarded ports differ from our own.
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
_HOST = re.compile(r"[a-z0-9._-]+|\[[0-9a-f:.]+\]")


class AllowedHosts:
    """The names in `Host` by which clients may address the gateway.

    The check stops DNS rebinding: a web page whose name resolves to this machine is of the same origin as the
    gateway, so that CORS does not apply to it. Its requests still carry its name.
    """

    def __init__(self, allowed: Iterable[str] = (ANY,)) -> None:
        """Allow these host names and addresses without ports besides those of this machine, or "*" for all.

        Raises:
            ValueError: an entry is not a host.

        """
        names = {_bracketed(name.lower()) for name in allowed}
        for name in names - {ANY}:
            if not _HOST.fullmatch(name):
                raise ValueError(
                    f"{name!r} is no host; write a name or an address without port and path, such as "
                    "ai.example.com, or * for every host"
                )
        self._is_any = ANY in names
        self._allowed = frozenset((*names, *_LOCAL_HOSTS))

    def allows(self, host: bytes) -> bool:
        """Return whether a request with this `Host` may be answered; one without is not from a page."""
        if self._is_any or not host:
            return True
        name = host.decode("latin-1").lower()
        before, colon, port = name.rpartition(":")
        if colon and port.isdigit():
            name = before
        return name.removesuffix(".") in self._allowed


def _bracketed(host: str) -> str:
    """Return the host as URLs have it: IPv6 addresses in brackets."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    return f"[{address}]" if address.version == 6 else host


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
            refusal = errors.wrong_origin(origin.decode("latin-1"))
            body = refusal.body()
            headers = [*refusal.headers(), (b"content-length", b"%d" % len(body))]
            await _send_response(refusal.status, headers, body, send)
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


async def _send_response(status: int, headers: list[Any], body: bytes, send: Send) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
