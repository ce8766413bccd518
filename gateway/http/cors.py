"""Which web pages may use the gateway (CORS). Pure; knows no keys: a page that has one sends it itself.

No cookies and no other credentials that a browser adds by itself are of any use here, so none are allowed.

CORS for what the application answers, and for browsers' questions about all paths. Decides nothing itself.
"""

import re
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import errors
from gateway.errors import Refusal
from gateway.request import RawHeaders

ANY = "*"
# Pages that this very machine serves, as Ollama has it. Not every page: to a gateway without keys, which
# listens on loopback, any site that its owner happens to visit could talk otherwise.
_OF_THIS_MACHINE = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?")
# scheme://host[:port], as browsers send it; some apps have schemes of their own.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@,]*|null")
_METHODS = b"GET, POST, PUT, PATCH, DELETE, OPTIONS"
# Chrome forgets answers to preflights after 2 h, whatever we say.
_REMEMBERED_S = b"7200"
_SHOWN = (
    b"retry-after, x-request-id, x-fleet-node, x-fleet-replica, x-fleet-attempts, x-fleet-store, "
    b"x-ratelimit-limit-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-requests, "
    b"x-ratelimit-remaining-tokens, x-ratelimit-reset-requests, x-ratelimit-reset-tokens"
)


class AllowedOrigins:
    """Where pages may come from: those of this machine, and those that were allowed."""

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        """Allow these as well, written as browsers send them, or "*" for all.

        Raises:
            ValueError: one of them is no origin.

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
        """Return whether a page from there may use the gateway; without an origin it is no page."""
        if not origin or self._is_any:
            return True
        name = origin.decode("latin-1").lower()
        return name in self._allowed or _OF_THIS_MACHINE.fullmatch(name) is not None

    def headers(self, origin: bytes) -> RawHeaders:
        """Return what an answer to a page has to say; nothing to who is not allowed, or no page."""
        if not origin or not self.allows(origin):
            return ()
        return (
            (b"access-control-allow-origin", b"*" if self._is_any else origin),
            (b"access-control-expose-headers", _SHOWN),
            (b"vary", b"origin"),
        )

    def preflight(self, asked_headers: bytes) -> RawHeaders:
        """Return what allows the request that a browser asks about before it makes it."""
        return (
            (b"access-control-allow-methods", _METHODS),
            # Not "*": that leaves out authorization.
            (b"access-control-allow-headers", asked_headers or b"authorization, content-type"),
            (b"access-control-max-age", _REMEMBERED_S),
        )


class CorsMiddleware:
    """An ASGI application around another."""

    def __init__(self, app: ASGIApp, origins: AllowedOrigins) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer preflights and pages that are not allowed; have the rest answered."""
        asked: dict[bytes, bytes] = dict(scope["headers"])
        origin = asked.get(b"origin", b"")
        if not origin:
            await self._app(scope, receive, send)
            return
        if not self._origins.allows(origin):
            await _send_refusal(errors.wrong_origin(origin.decode("latin-1")), send)
            return
        more = self._origins.headers(origin)
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in asked:
            wanted = asked.get(b"access-control-request-headers", b"")
            await _send_response(204, [*more, *self._origins.preflight(wanted)], b"", send)
            return

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *more]
            await send(message)

        await self._app(scope, receive, tell)


async def _send_refusal(refusal: Refusal, send: Send) -> None:
    body = refusal.body()
    headers = [*refusal.headers(), (b"content-length", b"%d" % len(body))]
    await _send_response(refusal.status, headers, body, send)


async def _send_response(status: int, headers: list[Any], body: bytes, send: Send) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
