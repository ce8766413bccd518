"""What a request says in its headers. Reads no clock and no body.

The parts of HTTP that every route shares: bodies with a limit, errors in OpenAI's form, headers.

Knows nothing of models or jobs.
"""

import asyncio
import math
from collections.abc import Callable, Container, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine import errors
from engine.errors import Refusal, RefusedError
from engine.request_log import RequestLog

TIMEOUT = "x-request-timeout"
RESUMABLE = "x-fleet-resumable"
# More than a day is no deadline but a mistake of units.
_MAX_TIMEOUT_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """How a request wants to be served, beyond its body."""

    timeout_s: float | None = None
    """From its arrival to the end of its answer; None: as long as it takes."""
    is_resumable: bool = False
    """A gateway's: chunks tell what is needed to continue elsewhere, and the body may continue."""


def read_options(headers: Mapping[str, str]) -> RequestOptions:
    """Return what the headers ask for.

    Raises:
        RefusedError: a value makes no sense; names the header.

    """
    return RequestOptions(
        timeout_s=_read_timeout(headers.get(TIMEOUT)),
        is_resumable=_read_flag(headers.get(RESUMABLE, "0")),
    )


def check_not_resumable(wishes: RequestOptions) -> None:
    """Refuse what only the endpoints of chats and completions can do.

    Raises:
        RefusedError: it was asked for.

    """
    if wishes.is_resumable:
        raise errors.invalid(
            f"The header '{RESUMABLE}' is for chats and completions; leave it out.", param=RESUMABLE
        )


def _read_timeout(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _MAX_TIMEOUT_S:
        raise errors.invalid(
            f"The header '{TIMEOUT}' must be a number of seconds, above 0 and at most "
            f"{_MAX_TIMEOUT_S:.0f}, such as 2.5; it is {text[:50]!r}.",
            param=TIMEOUT,
        )
    return seconds


def _read_flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise errors.invalid(
            f"The header '{RESUMABLE}' must be 0 or 1; it is {text[:50]!r}.", param=RESUMABLE
        )
    return text == "1"


def json_response(body: Any, status: int = 200) -> Response:
    """Return a JSON response."""
    return Response(orjson.dumps(body), status_code=status, media_type="application/json")


def refusal_response(refusal: Refusal) -> Response:
    """Return a refusal as a response."""
    response = json_response(refusal.body(), refusal.status)
    if refusal.retry_after_s is not None:
        response.headers["retry-after"] = str(refusal.retry_after_s)
    return response


async def on_refused(_: Request, error: Exception) -> Response:
    """Answer a refusal that came up from a route."""
    assert isinstance(error, RefusedError)
    return refusal_response(error.refusal)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Answer a wrong path or method."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    response = refusal_response(Refusal(status=error.status_code, message=message))
    response.headers.update(error.headers or {})
    return response


async def on_crash(_: Request, error: Exception) -> Response:
    """Answer when a route failed; uvicorn logs why."""
    message = f"The engine failed: {type(error).__name__}."
    return refusal_response(Refusal(status=500, message=message, type="server_error"))


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body.

    Raises:
        RefusedError: it is larger than the limit.
        ClientDisconnect: the client left while sending it.

    """
    too_large = RefusedError(
        Refusal(
            status=413, message=f"The body is larger than {limit} bytes.", code="body_too_large"
        )
    )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise too_large
    return bytes(body)


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do the work, but not beyond the client's leaving. The body must have been read before."""
    async with asyncio.TaskGroup() as group:
        working = group.create_task(work)
        watching = group.create_task(_until_disconnected(receive))
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        working.cancel()
        watching.cancel()


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass(frozen=True, slots=True)
class RequestMiddleware:
    """Adds headers, read at the moment a response starts, to whatever the app answers; and keeps the visit."""

    app: ASGIApp
    headers: Callable[[], Mapping[str, str]]
    request_log: RequestLog
    endpoints: Container[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)  # a websocket, which the app turns away
            return
        visit = self.request_log.begin(scope, self.endpoints)

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                visit.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers.update(self.headers())
                headers["x-request-id"] = visit.id
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                visit.is_answered = True

        try:
            await self.app(scope, receive, stamped)
        except ClientDisconnect:
            # It left while sending its body: there is nobody to answer and nothing to undo. What Starlette
            # made of it, an answer of a failed route, went nowhere.
            visit.status, visit.is_answered = 0, False
        finally:
            self.request_log.end(visit)
