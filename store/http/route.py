"""The way to etcd: HTTP over TCP, TLS or a unix socket. The only importer of etcd3-py.

Of etcd3-py's AioClient the route is used (URL, prefix, headers, raw calls). Its constructor blocks
and fails while etcd is down, its codec costs milliseconds a call, and its streams lose events, so
those are replaced: see docs/adr/0002-etcd-client.md and tests/store/test_etcd3_streams.py.
"""

import asyncio
import io
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import aiohttp
from etcd3 import AioClient

from store.address import EtcdAddress
from store.errors import (
    PermissionDeniedError,
    StoreError,
    UnauthenticatedError,
    UnavailableError,
)
from store.http import wire

CALL_S = 2.0
# Unary calls in flight at once; waiting for a place does not count against a call's time.
_AT_ONCE = 32
# Shorter than a call, so that a call can still go to another endpoint.
_CONNECT_S = 1.0
# Embedded etcd reports progress every 5 s; an external one may not, and then an idle watch is
# opened anew this often, which costs one request.
IDLE_S = 17.0


class _Route(AioClient):  # type: ignore[misc]  # etcd3-py has no types
    """etcd3-py's client with a constructor that does no I/O; used for raw calls only."""

    def __init__(self, base_url: str, session: aiohttp.ClientSession) -> None:
        # Not super().__init__(): it asks for the version with a blocking call.
        self.session = session
        self.base = base_url
        self.api_prefix = "/v3"
        self.api_spec = None
        self.headers: dict[str, str] = {}
        self.user_agent = "mlx-fleet"
        self.token: str | None = None
        self.timeout = None

    @property
    def baseurl(self) -> str:
        return self.base


class EtcdRoute:
    """Calls and streams over etcd's JSON gateway: sessions, tokens, turns of the endpoints.

    Connects when first used. Endpoints take turns: whoever fails is not asked next.
    """

    def __init__(self, address: EtcdAddress, *, idle_s: float = IDLE_S) -> None:
        self._address = address
        self._idle_s = idle_s
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._turn = 0
        self._token: str | None = None
        # etcd checks a password with bcrypt: 32 calls at once must not ask for 32 tokens.
        self._authenticating = asyncio.Lock()
        self._calls: aiohttp.ClientSession | None = None
        self._streams: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        for session in (self._calls, self._streams):
            if session is not None:
                await session.close()

    async def call(self, path: str, body: wire.Json, *, limit_s: float = CALL_S) -> wire.Json:
        """Return the answer of one unary call.

        Raises:
            StoreError: as `store.wire.exception_of` says.

        """
        async with self._places:
            for _ in self._address.endpoints[1:]:
                try:
                    return await self._ask(path, body, limit_s)
                except UnavailableError as error:
                    # Where nothing can have been written, the next may be asked, even to write.
                    if error.ambiguous:
                        raise
            return await self._ask(path, body, limit_s)

    async def _ask(self, path: str, body: wire.Json, limit_s: float) -> wire.Json:
        """Call one endpoint; once more with a fresh token if ours is stale."""
        token = await self._current_token(limit_s)
        try:
            return await self._exchange(path, body, limit_s, token)
        except UnauthenticatedError:
            if token is None:
                raise
        self._forget(token)
        return await self._exchange(path, body, limit_s, await self._current_token(limit_s))

    async def _exchange(
        self, path: str, body: wire.Json, limit_s: float, token: str | None
    ) -> wire.Json:
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=min(limit_s, _CONNECT_S))
        headers = {"Content-Type": "application/json"}
        turn, route = self._turn, self._route(self._session(), token)
        try:
            async with route.call_rpc(
                path, _payload(body), raw=True, timeout=timeout, headers=headers
            ) as response:
                raw = await response.read()
                if response.status == 200:
                    return wire.loads(raw)
                raise wire.exception_of(*wire.error_of(raw))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._pass_on(turn)
            raise self._unreachable(error) from error
        except UnavailableError:
            self._pass_on(turn)
            raise

    def _pass_on(self, turn: int) -> None:
        """Ask the next endpoint from here on; many calls that fail at once are one failure."""
        if self._turn == turn:
            self._turn += 1

    def _unreachable(self, error: BaseException) -> UnavailableError:
        what = str(error) or f"no answer ({type(error).__name__})"
        # Without a connection nothing can have been written.
        unconnected = isinstance(
            error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError
        )
        return UnavailableError(f"etcd at {self._address}: {what}", ambiguous=not unconnected)

    async def _current_token(self, limit_s: float) -> str | None:
        """Return the token to call with; None if we have no user."""
        if not self._address.username:
            return None
        try:
            async with asyncio.timeout(limit_s), self._authenticating:
                if self._token is None:
                    self._token = await self._authenticate(limit_s)
                return self._token
        except TimeoutError as error:
            raise self._unreachable(error) from error

    async def _authenticate(self, limit_s: float) -> str:
        body = {"name": self._address.username, "password": self._address.password}
        try:
            answer = await self._exchange("/auth/authenticate", body, limit_s, None)
        except UnavailableError as error:
            # No call was made yet, so nothing was written.
            raise UnavailableError(str(error)) from error
        except StoreError as error:
            raise PermissionDeniedError(
                f"etcd refuses user {self._address.username!r}: {error}"
            ) from error
        return str(wire.at(answer, "token"))

    def _forget(self, token: str | None) -> None:
        if self._token == token:
            self._token = None

    def _route(self, session: aiohttp.ClientSession, token: str | None) -> _Route:
        urls = self._address.endpoints or ("http://localhost",)
        route = _Route(urls[self._turn % len(urls)].rstrip("/"), session)
        route.token = token
        return route

    def _session(self) -> aiohttp.ClientSession:
        if self._calls is None:
            self._calls = aiohttp.ClientSession(connector=self._connector(limit=_AT_ONCE))
        return self._calls

    def _connector(self, *, limit: int, force_close: bool = False) -> aiohttp.BaseConnector:
        if self._address.socket is not None:
            return aiohttp.UnixConnector(
                str(self._address.socket), limit=limit, force_close=force_close
            )
        try:
            tls = self._address.ssl_context() or True
        except OSError as error:  # SSLError is one
            raise UnavailableError(
                f"etcd at {self._address}: the certificate files cannot be used: {error}"
            ) from error
        return aiohttp.TCPConnector(limit=limit, force_close=force_close, ssl=tls)

    @asynccontextmanager
    async def stream(
        self, path: str, body: wire.Json, headers: dict[str, str]
    ) -> AsyncGenerator[AsyncGenerator[bytes]]:
        if self._streams is None:
            # No limit: a watch must never wait for another's connection.
            self._streams = aiohttp.ClientSession(
                connector=self._connector(limit=0, force_close=True), read_bufsize=2**20
            )
        token = await self._current_token(CALL_S)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CALL_S, sock_read=self._idle_s)
        turn, route = self._turn, self._route(self._streams, token)
        headers = {"Content-Type": "application/json", **headers}
        try:
            async with route.call_rpc(
                path, wire.dumps(body), raw=True, timeout=timeout, headers=headers
            ) as response:
                yield _lines(response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._pass_on(turn)
            raise self._unreachable(error) from error
        except UnavailableError:
            self._pass_on(turn)
            self._forget(token)  # it may be stale; etcd cancels such a watch as denied
            raise


def _payload(body: wire.Json) -> bytes | io.BytesIO:
    """Return the body as aiohttp wants it: a large one as a file, or it warns."""
    raw = wire.dumps(body)
    return raw if len(raw) < 2**20 else io.BytesIO(raw)


async def _lines(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes]:
    """Yield frames: newline-delimited, several in a chunk, and split across chunks.

    Raises:
        UnavailableError: the server refused or ended the stream.

    """
    if response.status != 200:
        code, text = wire.error_of(await response.read())
        raise UnavailableError(f"watch refused: {text} (code {code})")
    rest: list[bytes] = []
    async for chunk in response.content.iter_any():
        if b"\n" not in chunk:
            rest.append(chunk)
            continue
        *lines, last = (b"".join(rest) + chunk).split(b"\n")
        rest = [last] if last else []
        for line in lines:
            if line:
                yield line
    raise UnavailableError("etcd ended the stream")
