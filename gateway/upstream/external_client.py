"""Calls to external servers over HTTP/1.1. Must not follow redirects, keep cookies, use proxies or decompress bodies.

aiohttp has the connections and the parser. A call is one task from its start to the end of its response.
"""

import asyncio
import io
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, Final, cast
from weakref import WeakSet

import aiohttp
from aiohttp import AddrInfoType, hdrs
from aiohttp.connector import Connection
from aiohttp.http import HttpProcessingError
from typing_extensions import override
from yarl import URL

from gateway.upstream.call import (
    BrokenResponseError,
    CallCarrier,
    EngineCall,
    UnreachableError,
)
from gateway.upstream.dialer import CONNECT_S, Dialer, set_keepalive
from gateway.upstream.response_head import InvalidResponseError, ResponseHead, list_lines, read_head
from gateway.upstream.tls import external_context
from machinery import engine_link
from machinery.clock import NEVER, Clock
from machinery.engine_link import RequestHead
from schemas.wire.connections import POOL_IDLE_S
from schemas.wire.engine_address import EngineAddress

log = logging.getLogger(__name__)

_NO_AUTO_HEADERS: Final = (hdrs.ACCEPT, hdrs.ACCEPT_ENCODING, hdrs.USER_AGENT)
# Of one request on connections that the server had closed while they were idle.
_MOST_TRIES: Final = 4
_CLOSED: Final = "the server closed the connection"
_LINE_FEED: Final = "\n"


class _Connector(aiohttp.TCPConnector):
    """Takes no connection on which the server sent anything before the request: it could pass for the response."""

    @override
    async def connect(self, *args: Any, **kwargs: Any) -> Connection:
        connection = await super().connect(*args, **kwargs)
        if connection.protocol is not None and connection.protocol.should_close:
            connection.close()
            raise aiohttp.ServerDisconnectedError
        return connection


class _Response(aiohttp.ClientResponse):
    """Closes the connection if the head is not valid, and ends its body with the connection.

    What follows such a head could be taken for the response to another request. aiohttp 3.14 closes the connection
    after chunks that are not valid, but leaves the reader of the body waiting.
    """

    head: ResponseHead
    _lost: asyncio.Future[None] | None = None

    @override
    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        protocol = connection.protocol
        assert protocol is not None
        self._lost = protocol.closed
        await super().start(connection)
        if self._lost is None:
            self._end_body()
        else:
            self._lost.add_done_callback(self._on_lost)
        try:
            self.head = _read_head(self)
        except BrokenResponseError:
            protocol.close()
            raise
        return self

    @override
    def close(self) -> None:
        if self._lost is not None:
            self._lost.remove_done_callback(self._on_lost)
        super().close()

    def _on_lost(self, lost: asyncio.Future[None]) -> None:
        lost.exception()  # it is the body's, too
        self._end_body()

    def _end_body(self) -> None:
        if not self.content.is_eof() and self.content.exception() is None:
            self.content.set_exception(aiohttp.ClientPayloadError("the body is not valid"))


class ExternalClient:
    """The connections to external servers, and the calls in progress. `EngineLinks` holds the calls' time limits."""

    def __init__(self, clock: Clock, dialer: Dialer) -> None:
        self.now: Final = clock.monotonic
        self.dialer: Final = dialer
        self.calls: set[EngineCall] = set()
        self.heard: set[EngineAddress] = set()
        """The servers that sent anything since this was last cleared."""
        self.session: aiohttp.ClientSession | None = None
        self._sockets: WeakSet[socket.socket] = WeakSet()

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Open connections until the end of the block; outside of it servers are unreachable."""
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_reuseconn.append(_on_reused_connection)
        async with aiohttp.ClientSession(
            connector=_Connector(
                limit=0, keepalive_timeout=POOL_IDLE_S, socket_factory=self._make_socket
            ),
            response_class=_Response,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=_NO_AUTO_HEADERS,
            trace_configs=[tracing],
        ) as session:
            self.session = session
            try:
                yield
            finally:
                self.session = None

    def send(self, call: EngineCall) -> None:
        """Send a request; its response, or the reason why there is none, goes to the call."""
        self.calls.add(call)
        call.connection = ExternalRequest(self, call)

    def connections(self) -> int:
        """Return the number of connections, idle ones included."""
        return sum(sock.fileno() >= 0 for sock in self._sockets)

    def close(self) -> None:
        """Give up all calls."""
        for call in tuple(self.calls):
            call.cancel()

    def _make_socket(self, address: AddrInfoType) -> socket.socket:
        family, type_, protocol, _, _ = address
        sock = socket.socket(family, type_, protocol)
        set_keepalive(sock)
        self._sockets.add(sock)
        return sock


class ExternalRequest(CallCarrier):
    """One call: a task that sends the request and hands over what comes back."""

    def __init__(self, client: ExternalClient, call: EngineCall) -> None:
        self.is_reused = False
        """True if the connection was idle before: the server may have closed it in the moment of the request."""
        self.call: Final = call
        self.client: Final = client
        self._can_read = asyncio.Event()
        self._can_read.set()
        self._task = asyncio.get_running_loop().create_task(self._run())

    @override
    def drop(self, call: EngineCall) -> None:
        self._release()
        self._task.cancel()

    @override
    def fail_call(self, call: EngineCall, why: str, *, is_silence: bool) -> None:
        self.drop(call)
        call.on_error(BrokenResponseError(why, had_bytes=call.has_bytes, is_silence=is_silence))

    @override
    def pause(self, call: EngineCall) -> None:
        call.is_paused, call.silent_since = True, NEVER
        self._can_read.clear()

    @override
    def resume(self, call: EngineCall) -> None:
        if call.is_paused:
            call.is_paused, call.silent_since = False, self.client.now()
            self._can_read.set()

    def _release(self) -> None:
        self.client.calls.discard(self.call)
        self.call.connection, self.call.silent_since = None, NEVER

    async def _run(self) -> None:
        call = self.call
        try:
            response = await self._send()
            try:
                await self._receive(response)
            finally:
                response.close()  # also of a request that the server has not read to its end
        except (UnreachableError, BrokenResponseError) as error:
            self._release()
            call.on_error(error)
        except Exception:
            # The edge of the task: the call would wait until its time limit.
            log.exception("a call to an external server failed", extra={"server": call.origin.host})
            if call.connection is self:
                self._release()
                call.on_error(BrokenResponseError("the gateway failed", had_bytes=call.has_bytes))

    async def _send(self) -> _Response:
        """Return the response to the request, whose body has not arrived yet."""
        call = self.call
        head, first = engine_link.decode_request(call.raw)
        body = b"".join((first, call.body))
        call.raw = call.body = b""  # streams live long
        tries = 1
        while True:
            try:
                return await self._try(head, body)
            except BrokenResponseError as error:
                # The server closed the connection while it was idle, and never saw the request.
                if error.had_bytes or not self.is_reused or tries == _MOST_TRIES:
                    raise
            except UnreachableError as error:
                if not error.is_own_fault or tries > 1 or not self.client.dialer.make_room():
                    raise
                await asyncio.sleep(0)  # the descriptors are free in the next turn of the loop
            tries += 1

    async def _try(self, head: RequestHead, body: bytes) -> _Response:
        call, session, origin = self.call, self.client.session, self.call.origin
        if session is None:
            raise UnreachableError("the gateway stops", is_own_fault=True)
        self.is_reused, call.silent_since = False, self.client.now()
        left_s = call.until_s - call.silent_since
        limit_s = max(0.001, min(CONNECT_S, call.silence_s, left_s))
        lines = list_lines(head.lines)
        try:
            response = await session.request(
                head.method,
                URL(origin.http_url + head.path, encoded=True),
                headers=[(name.decode(), value.decode()) for name, value in lines],
                data=io.BytesIO(body) if body else None,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=None, connect=limit_s),
                ssl=external_context(origin.authorities) if origin.authorities else True,
                trace_request_ctx=self,
            )
        except aiohttp.ConnectionTimeoutError as error:
            why = f"no connection within {limit_s:.3g} s"
            raise UnreachableError(why, is_timeout=True) from error
        except aiohttp.ClientConnectorCertificateError as error:
            why_not = cast("ssl.SSLError", error.certificate_error)
            raise self.client.dialer.unreachable(origin, why_not) from error
        except aiohttp.ClientConnectorError as error:
            raise self.client.dialer.unreachable(origin, error.os_error) from error
        except ValueError as error:
            raise UnreachableError(f"{origin.host[:100]!r} is no host name") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _broken(error, has_head=False) from error
        assert isinstance(response, _Response)
        return response

    async def _receive(self, response: _Response) -> None:
        """Hand over the response."""
        call, client = self.call, self.client
        client.dialer.record_success(call.origin)
        client.heard.add(call.origin)
        call.has_bytes, call.silent_since = True, client.now()
        call.on_head(response.head)
        while call.connection is self:
            await self._can_read.wait()
            try:
                data = await response.content.readany()
            except (aiohttp.ClientError, HttpProcessingError, OSError) as error:
                raise _broken(error, has_head=True) from error
            client.heard.add(call.origin)
            if response.content.at_eof():
                self._release()
                call.on_end(data)
                return
            if not call.is_paused:
                call.silent_since = client.now()
            call.on_body(data)


async def _on_reused_connection(
    _session: aiohttp.ClientSession, context: SimpleNamespace, _params: object
) -> None:
    request: ExternalRequest = context.trace_request_ctx
    request.is_reused = True


def _read_head(response: aiohttp.ClientResponse) -> ResponseHead:
    """Return the head of a response.

    Raises:
        BrokenResponseError: it is not valid, or is no answer to the request.

    """
    if not 200 <= response.status <= 599:
        raise BrokenResponseError(f"a response with status {response.status}", had_bytes=True)
    try:
        return read_head(response.status, (b"%b: %b" % pair for pair in response.raw_headers))
    except InvalidResponseError as error:
        raise BrokenResponseError(f"not HTTP: {error}", had_bytes=True) from error


def _broken(error: Exception, *, has_head: bool) -> BrokenResponseError:
    """Return what a failure after the connection was opened means: the first line of aiohttp's; the rest quotes the server."""
    had_bytes = True
    if isinstance(error, aiohttp.ServerDisconnectedError):
        # The message is the head if a part of it had arrived.
        why, had_bytes = _CLOSED, has_head or not isinstance(error.message, str)
    elif isinstance(error, OSError):
        why, had_bytes = f"the connection was lost: {error}", has_head
    else:
        message = getattr(error, "message", "") or str(error)
        why = f"not HTTP: {message.strip().partition(_LINE_FEED)[0][:200]}"
    return BrokenResponseError(why, had_bytes=had_bytes)
