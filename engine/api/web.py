"""HTTP parts that all routes share: request headers and bodies, JSON responses, refusals, and the middleware.

Nothing here knows models or jobs.
"""

import asyncio
import re
from collections.abc import Callable, Container, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.admission import ClaimedBytes
from engine.api.connections import IS_LINK
from engine.api.progress import ProgressReporter
from engine.request_log import RequestLog
from machinery import host_header, multipart
from schemas.wire import errors, headers
from schemas.wire.errors import Refusal, RefusedError

_SALT = re.compile(r"[0-9a-f]{32}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options that a request states in its headers."""

    timeout_s: float | None = None
    """Seconds from the arrival to the end of the answer; None waits without a limit."""
    is_resumable: bool = False
    """True if a gateway wants resume records, and may send the field `fleet`."""
    cache_salt: str = ""
    """The salt of the sender's API key; empty if it has none."""


def read_options(request_headers: Mapping[str, str]) -> RequestOptions:
    """Return the options in the headers of a request.

    Raises:
        RefusedError: a value is wrong; names the header.

    """
    timeout = request_headers.get(headers.REQUEST_TIMEOUT)
    return RequestOptions(
        timeout_s=None if timeout is None else headers.parse_timeout(timeout),
        is_resumable=_read_flag(request_headers.get(headers.RESUMABLE, "0")),
        cache_salt=_read_salt(request_headers.get(headers.CACHE_SALT)),
    )


def check_not_resumable(options: RequestOptions) -> None:
    """Refuse the header that only generations support.

    Raises:
        RefusedError: it is set.

    """
    if options.is_resumable:
        raise errors.invalid(
            f"The header '{headers.RESUMABLE}' is for chats, completions and responses; leave it out.",
            param=headers.RESUMABLE,
        )


def _read_salt(text: str | None) -> str:
    if text is None:
        return ""
    if not _SALT.fullmatch(text):
        raise errors.invalid(
            f"The header '{headers.CACHE_SALT}' must be 32 hexadecimal digits; it is {text[:50]!r}.",
            param=headers.CACHE_SALT,
        )
    return text


def _read_flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise errors.invalid(
            f"The header '{headers.RESUMABLE}' must be 0 or 1; it is {text[:50]!r}.",
            param=headers.RESUMABLE,
        )
    return text == "1"


def json_response(body: Any, status: int = 200) -> Response:
    """Return a JSON response."""
    return Response(orjson.dumps(body), status_code=status, media_type="application/json")


def refusal_response(refusal: Refusal) -> Response:
    """Return a refusal as a response."""
    response_headers = {name.decode(): value.decode() for name, value in refusal.headers()}
    return Response(refusal.body(), status_code=refusal.status, headers=response_headers)


async def on_refused(_: Request, error: Exception) -> Response:
    """Answer a refusal that a route raised."""
    assert isinstance(error, RefusedError)
    return refusal_response(error.refusal)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Answer a request with an unknown path or a wrong method."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    response = refusal_response(Refusal(status=error.status_code, message=message))
    response.headers.update(error.headers or {})
    return response


async def on_crash(_: Request, error: Exception) -> Response:
    """Answer a request whose route failed; uvicorn logs the error."""
    return refusal_response(errors.internal(f"The engine failed: {type(error).__name__}.").refusal)


def check_sender(request_headers: Mapping[str, str], names: Iterable[str] | None) -> None:
    """Refuse requests that web pages send: an engine has no API keys, and its port can be guessed.

    `names` are those of this machine; None accepts any, on a socket that no web page can reach. Gateways, agents and clients send no `Origin`; browsers always do, unless the page
    came from this very port under a name of its own.

    Raises:
        RefusedError: there is an `Origin`, or `Host` has the name of another machine.

    """
    if "origin" in request_headers:
        message = "An engine does not serve web pages: send the request to the gateway."
        raise RefusedError(
            Refusal(status=403, message=message, param="origin", code="origin_refused")
        )
    host = request_headers.get("host")
    if names is not None and host is not None and not host_header.is_known(host, names):
        message = (
            f"This engine is not called {host[:100]!r}: use its address, localhost or the name of its machine, "
            "or send the request to the gateway."
        )
        raise RefusedError(Refusal(status=403, message=message, param="host", code="host_refused"))


def check_model(name: str, served: Sequence[str]) -> None:
    """Refuse the name of another model.

    Raises:
        RefusedError: this engine does not serve it.

    """
    if name not in served:
        message = f"The model '{name[:200]}' does not exist here. This replica serves: {', '.join(served)}."
        raise RefusedError(
            Refusal(status=404, message=message, param="model", code="model_not_found")
        )


async def read_body(
    request: Request, limit: int, claimed: ClaimedBytes, *, is_form: bool = False
) -> bytes:
    """Return the body of a request, which must be JSON or else a form, and claim its memory.

    Raises:
        RefusedError: it is larger than `limit` bytes, there is no memory for it, or it is declared as something else.
        ClientDisconnect: the client disconnected while it sent the body.

    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    wanted = multipart.MEDIA_TYPE if is_form else "application/json"
    is_json = kind.startswith("application/") and kind.endswith("+json")
    if kind != wanted and (is_form or not is_json):
        form = "a form with a file" if is_form else "JSON"
        message = f"The body must be {form}: send 'content-type: {wanted}', not {kind[:50]!r}."
        raise RefusedError(
            Refusal(
                status=415, message=message, param="content-type", code="unsupported_media_type"
            )
        )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise errors.body_too_large(limit)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise errors.body_too_large(limit)
        claimed.grow(len(body))
    return bytes(body)


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until it ends or the client disconnects. The request body must have been read before."""
    async with asyncio.TaskGroup() as group:
        working = group.create_task(work)
        watching = group.create_task(_cancel_when_disconnected(receive, working))
        await asyncio.wait((working,))
        watching.cancel()


async def _cancel_when_disconnected(receive: Receive, working: asyncio.Task[None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    # At once: uvicorn lets a `send` that waits for the client go on next, and all that waits behind it would be encoded.
    working.cancel()


@dataclass(frozen=True, slots=True)
class RequestMiddleware:
    """Adds the engine's headers to every response, and records every request."""

    app: ASGIApp
    headers: Callable[[], Mapping[str, str]]
    """Called at the moment a response starts."""
    request_log: RequestLog
    endpoints: Container[str]
    """All paths that exist."""
    names: Iterable[str] | None
    """The names of this machine, for `check_sender`; None if it listens on a socket."""
    progress: Callable[[], int]
    """A number that grows as long as the engine advances."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)  # a websocket, which the app refuses
            return
        record = self.request_log.begin(scope, self.endpoints)
        reporter = ProgressReporter.start(scope, self.progress)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                if reporter is not None:
                    reporter.close()
                record.status = message["status"]
                record.leave()  # not counted in the headers of its own refusal
                if IS_LINK not in scope.get("state", ()):
                    response_headers = MutableHeaders(scope=message)
                    response_headers.update(self.headers())
                    response_headers[headers.REQUEST_ID] = record.id
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                record.is_answered = True

        try:
            check_sender(Headers(scope=scope), self.names)
            await self.app(scope, receive, send_with_headers)
        except RefusedError as error:
            await refusal_response(error.refusal)(scope, receive, send_with_headers)
        except ClientDisconnect:
            # The client left while it sent the body. Starlette answered with an error that nothing received.
            record.status, record.is_answered = 0, False
        finally:
            if reporter is not None:
                reporter.close()
            self.request_log.end(record)
