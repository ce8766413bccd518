"""The way to etcd: HTTP over TCP, TLS or a unix socket. The only importer of etcd3-py.

Of etcd3-py's AioClient the route is used (URL, prefix, headers, raw calls). Its constructor blocks
and fails while etcd is down, its codec costs milliseconds a call, and its streams lose events, so
those are replaced: see docs/adr/0002-etcd-client.md and tests/store/test_etcd3_streams.py.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from io import BytesIO

import aiohttp
from etcd3 import AioClient

from store import wire
from store.address import EtcdAddress
from store.errors import PermissionDeniedError, UnavailableError

CALL_S = 2.0
# Unary calls in flight at once; waiting for a place does not count against a call's time.
_AT_ONCE = 32
# Embedded etcd reports progress every 5 s; an external one may not, and then an idle watch is
# opened anew this often, which costs one request.
_IDLE_S = 17.0


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

    def __init__(self, address: EtcdAddress) -> None:
        self._address = address
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._turn = 0
        self._token: str | None = None
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
            for fresh_token in (False, True):
                if self._address.username and (self._token is None or fresh_token):
                    await self._authenticate(limit_s)
                status, raw = await self._post(path, body, limit_s)
                if status == 200:
                    return wire.loads(raw)
                code, text = wire.error_of(raw)
                stale = code == wire.UNAUTHENTICATED and self._address.username
                if not stale or fresh_token:
                    raise self._failed(code, text)
        raise AssertionError("unreachable")

    def _failed(self, code: int, text: str) -> Exception:
        error = wire.exception_of(code, text)
        if isinstance(error, UnavailableError):
            self._turn += 1
        return error

    async def _post(self, path: str, body: wire.Json, limit_s: float) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=limit_s)
        headers = {"Content-Type": "application/json"}
        route = self._route(self._session())
        try:
            # A file object, because aiohttp warns of large bodies given as bytes.
            data = BytesIO(wire.dumps(body))
            async with route.call_rpc(
                path, data, raw=True, timeout=timeout, headers=headers
            ) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._turn += 1
            raise self._unreachable(error) from error

    def _unreachable(self, error: BaseException) -> UnavailableError:
        what = str(error) or f"no answer ({type(error).__name__})"
        # A refused connection is the one failure after which nothing can have been written.
        refused = isinstance(error, aiohttp.ClientConnectorError)
        return UnavailableError(f"etcd at {self._address}: {what}", ambiguous=not refused)

    async def _authenticate(self, limit_s: float) -> None:
        self._token = None
        body = {"name": self._address.username, "password": self._address.password}
        status, raw = await self._post("/auth/authenticate", body, limit_s)
        if status != 200:
            code, text = wire.error_of(raw)
            error = wire.exception_of(code, text)
            if isinstance(error, UnavailableError):
                raise error
            raise PermissionDeniedError(f"etcd refuses user {self._address.username!r}: {text}")
        self._token = str(wire.loads(raw)["token"])

    def _route(self, session: aiohttp.ClientSession) -> _Route:
        urls = self._address.endpoints or ("http://localhost",)
        route = _Route(urls[self._turn % len(urls)].rstrip("/"), session)
        route.token = self._token
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
        return aiohttp.TCPConnector(
            limit=limit, force_close=force_close, ssl=self._address.ssl_context() or True
        )

    @asynccontextmanager
    async def stream(
        self, path: str, body: wire.Json, headers: dict[str, str]
    ) -> AsyncGenerator[AsyncGenerator[bytes]]:
        if self._streams is None:
            # No limit: a watch must never wait for another's connection.
            self._streams = aiohttp.ClientSession(
                connector=self._connector(limit=0, force_close=True), read_bufsize=2**20
            )
        if self._address.username and self._token is None:
            await self._authenticate(CALL_S)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CALL_S, sock_read=_IDLE_S)
        route = self._route(self._streams)
        headers = {"Content-Type": "application/json", **headers}
        try:
            async with route.call_rpc(
                path, wire.dumps(body), raw=True, timeout=timeout, headers=headers
            ) as response:
                if response.status != 200:
                    code, text = wire.error_of(await response.read())
                    self._token = None  # it may be stale; on 3.5.1 that reads as denied
                    raise UnavailableError(f"watch refused: {text} (code {code})")
                yield _lines(response.content)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._turn += 1
            raise self._unreachable(error) from error


async def _lines(content: aiohttp.StreamReader) -> AsyncGenerator[bytes]:
    """Yield frames: newline-delimited, several in a chunk, and split across chunks.

    Raises:
        UnavailableError: the server ended the stream.

    """
    rest: list[bytes] = []
    async for chunk in content.iter_any():
        if b"\n" not in chunk:
            rest.append(chunk)
            continue
        *lines, last = (b"".join(rest) + chunk).split(b"\n")
        rest = [last] if last else []
        for line in lines:
            if line:
                yield line
    raise UnavailableError("etcd ended the stream")
