"""A gateway of the fleet at addresses of this machine, for programs that know no other address and have no key.

Requests pass unchanged but for their key: the proxy adds the fleet's, verifies the gateway's certificate, and uses another
gateway when one does not answer. Web pages of other sites are refused, and requests without `token`, where one is given.
"""

import asyncio
import hmac
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TypeAlias

import aiohttp
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from yarl import URL

from fleetctl.chat.answer_stream import GatewayAccess
from fleetctl.cli.errors import FleetctlError
from machinery.clock import Clock
from machinery.http_server import AdminServer, ConnectionLimits
from machinery.request_body import BodyReader, RequestRefusedError

HOST = "127.0.0.1"
# Four times a gateway's default, so that the gateway refuses a body, and says its own limit.
_BODY_BYTES = 32 << 20
_LIMITS = ConnectionLimits(connections=128, stall_s=600.0)
# RFC 9110, 7.6.1; a key of the program's own means nothing to the fleet.
_HOP_BY_HOP = {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
_NOT_SENT = _HOP_BY_HOP | {
    "host",
    "content-length",
    "authorization",
    "x-api-key",
    "accept-encoding",
}
_NOT_RETURNED = _HOP_BY_HOP | {"content-length", "content-encoding", "date", "server"}

OnRequest: TypeAlias = Callable[[str, Mapping[bytes, bytes], bytes], None]
"""Gets path, headers and body of each request of a program."""

_ORIGIN = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?")


class LocalProxy:
    """An ASGI app that passes requests on to the first gateway that accepts a connection."""

    def __init__(
        self,
        gateways: Sequence[GatewayAccess],
        http: aiohttp.ClientSession,
        *,
        token: str = "",
        on_request: OnRequest | None = None,
    ) -> None:
        """`gateways`: at least one, in the order of use. `token`: what clients send as their key; "": anything."""
        self._gateways = list(gateways)
        self._http = http
        self._token = token
        self._on_request = on_request
        self._bodies = BodyReader(limit_bytes=_BODY_BYTES, limit_s=120.0, at_once=8)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request as a gateway does."""
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        try:
            self._check_client(request)
            response = await self._forward(request)
        except RequestRefusedError as error:
            body = {"message": str(error), "type": "api_error", "param": None, "code": None}
            response = JSONResponse({"error": body}, error.status, error.headers)
        await response(scope, receive, send)

    def _check_client(self, request: Request) -> None:
        """Refuse web pages of other sites, and clients without the token. Raises RequestRefusedError."""
        origin = request.headers.get("origin", "")
        if origin and _ORIGIN.fullmatch(origin) is None:
            raise RequestRefusedError(403, f"web pages of {origin[:200]} may not use this address")
        header = request.headers.get("authorization", "")
        key = header.removeprefix("Bearer ") if header else request.headers.get("x-api-key", "")
        if self._token and not hmac.compare_digest(key.encode(), self._token.encode()):
            raise RequestRefusedError(
                401, "this address belongs to a program that fleetctl started"
            )

    async def _forward(self, request: Request) -> Response:
        """Return the answer of the first gateway that accepts a connection. Raises RequestRefusedError: none does."""
        body = await self._bodies.read(request)
        headers = [(k, v) for k, v in request.headers.items() if k not in _NOT_SENT]
        if self._on_request is not None:
            fields = {k.encode(): v.encode("latin-1") for k, v in headers}
            self._on_request(request.url.path, fields, body)
        path, query = request.scope["raw_path"], request.scope["query_string"]
        # Of any other form it could become a part of the host, which gets the key.
        if not path.startswith(b"/"):
            raise RequestRefusedError(400, "the target of a request is a path")
        target = (path + (b"?" + query if query else b"")).decode("latin-1")
        failed = []
        for gateway in tuple(self._gateways):
            arguments = gateway.arguments()
            arguments["headers"] = [*headers, *arguments["headers"].items()]
            try:
                url = URL(gateway.url + target, encoded=True)
                answer = await self._http.request(
                    request.method, url, data=body or None, **arguments
                )
            except aiohttp.ClientConnectorError as error:
                failed.append(f"{gateway.url}: {error.strerror or error}")
                # The one that answers is asked first from now on.
                self._gateways = [*(g for g in self._gateways if g is not gateway), gateway]
                continue
            except (aiohttp.ClientError, TimeoutError) as error:
                why = str(error) or type(error).__name__
                raise RequestRefusedError(502, f"{gateway.url} broke off: {why}") from error
            return StreamingResponse(
                _pieces(answer),
                answer.status,
                {k: v for k, v in answer.headers.items() if k.lower() not in _NOT_RETURNED},
            )
        raise RequestRefusedError(502, f"no gateway of the fleet answers ({'; '.join(failed)})")


async def _pieces(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the body of an answer; a client that goes away ends the request at the gateway, too."""
    async with answer:
        async for piece in answer.content.iter_any():
            yield piece


@asynccontextmanager
async def serving(
    gateways: Sequence[GatewayAccess],
    ports: Sequence[int],
    clock: Clock,
    *,
    token: str = "",
    on_request: OnRequest | None = None,
) -> AsyncIterator[list[str]]:
    """Serve the proxy on loopback ports (0: any), and yield its URLs in their order.

    Raises:
        FleetctlError: a port is in use.

    """
    timeout = aiohttp.ClientTimeout(
        total=None, sock_connect=gateways[0].connect_s, sock_read=gateways[0].silence_s
    )
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as http,
            asyncio.TaskGroup() as tasks,
        ):
            app = LocalProxy(gateways, http, token=token, on_request=on_request)
            running, servers = [], []
            for port in ports:
                changed = asyncio.Event()
                server = AdminServer(app, clock, (HOST, port), changed.set, limits=_LIMITS)
                running.append(tasks.create_task(server.run()))
                servers.append(server)
                await changed.wait()
            try:
                for server in servers:
                    if server.error:
                        raise FleetctlError(_in_use_text(server.error))
                yield [server.url for server in servers]
            finally:
                for task in running:
                    task.cancel()
    except BaseExceptionGroup as group:
        # The error of the caller's block, or of a port: the servers raise none.
        raise group.exceptions[0] from None


def _in_use_text(error: str) -> str:
    return f"{error}. Quit Ollama or LM Studio if it runs here, or give another --port"
