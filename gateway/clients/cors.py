"""CORS for what the application answers, and for browsers' questions about all paths. Decides nothing itself."""

from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.clients import refusals
from gateway.clients.origins import Origins
from gateway.errors import Refusal


class Cors:
    """An ASGI application around another."""

    def __init__(self, app: ASGIApp, origins: Origins) -> None:
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
            await _refuse(refusals.wrong_origin(origin.decode("latin-1")), send)
            return
        more = self._origins.headers(origin)
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in asked:
            wanted = asked.get(b"access-control-request-headers", b"")
            await _answer(204, [*more, *self._origins.preflight(wanted)], b"", send)
            return

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *more]
            await send(message)

        await self._app(scope, receive, tell)


async def _refuse(refusal: Refusal, send: Send) -> None:
    body = refusal.body()
    headers = [*refusal.headers(), (b"content-length", b"%d" % len(body))]
    await _answer(refusal.status, headers, body, send)


async def _answer(status: int, headers: list[Any], body: bytes, send: Send) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
