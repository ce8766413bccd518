"""etcd's JSON gateway: encoding of requests and answers, calls and streams over TCP, TLS or a unix socket.

Formats differ between builds of etcd (spacing, grpc-gateway v1 and v2 error bodies). Integers of 64 bits are strings,
bytes are base64, zeros and empty values are omitted.

The only importer of etcd3-py. Only AioClient's URL, prefix, headers and raw calls are used. Its constructor blocks and
fails while etcd is down, its codec costs milliseconds a call, and its streams lose events, so those are replaced: see
docs/adr/0002-etcd-clients.md.
"""

import asyncio
import io
import socket
import ssl
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import assert_never

import aiohttp
import orjson
from aiohttp import AddrInfoType
from etcd3 import AioClient

from machinery.tcp_keepalive import enable_keepalive
from store.errors import UnauthenticatedError, UnavailableError
from store.etcd.adapter import AT_ONCE, CALL_S, CONNECT_S, HEARTBEAT_S, IDLE_S, EndpointCaller
from store.etcd.address import EtcdAddress
from store.etcd.authentication import AUTHENTICATE_S, Authentication
from store.etcd.error_mapping import (
    connection_error,
    error_from_status,
    is_refusal,
    slow_error,
)
from store.etcd.json_values import (
    MAX_ANSWER_BYTES,
    Json,
    b64,
    error_body,
    field_at,
    key_value,
    not_etcd_error,
    too_large_error,
)
from store.port import (
    CreateRevisionGuard,
    Delete,
    Guard,
    KeyChange,
    ModRevisionGuard,
    Operation,
    Put,
)

__all__ = [
    "Json",
    "b64",
    "change",
    "error_of_body",
    "field_at",
    "is_object",
    "key_value",
    "loads",
    "transaction",
]


def loads(raw: bytes) -> Json:
    """Parse a JSON object.

    Raises:
        UnavailableError: it is not a JSON object: the server is not etcd, or the answer was truncated.

    """
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise not_etcd_error(raw) from error
    if not isinstance(value, dict):
        raise not_etcd_error(raw)
    return value


def change(tree: Json) -> KeyChange:
    """Return one event of a watch; a put carries no type."""
    now = key_value(field_at(tree, "kv"))
    gone = tree.get("type") == "DELETE"
    return KeyChange(key=now.key, mod_revision=now.mod_revision, now=None if gone else now)


def transaction(guards: Sequence[Guard], operations: Sequence[Operation]) -> Json:
    return {
        "compare": [_compare(guard) for guard in guards],
        "success": [_operation(operation) for operation in operations],
    }


def _compare(guard: Guard) -> Json:
    match guard:
        case ModRevisionGuard(key=key, mod_revision=revision):
            return {
                "key": b64(key),
                "target": "MOD",
                "result": "EQUAL",
                "mod_revision": str(revision),
            }
        case CreateRevisionGuard(key=key, create_revision=revision):
            return {
                "key": b64(key),
                "target": "CREATE",
                "result": "EQUAL",
                "create_revision": str(revision),
            }
        case _:
            assert_never(guard)


def _operation(operation: Operation) -> Json:
    match operation:
        case Put(key=key, value=value, lease=lease):
            put = {"key": b64(key), "value": b64(value)}
            return {"request_put": {**put, "lease": str(lease)} if lease else put}
        case Delete(key=key):
            return {"request_delete_range": {"key": b64(key)}}
        case _:
            assert_never(operation)


def is_object(raw: bytes) -> bool:
    """Return whether the body can be etcd's: its answers and errors are objects."""
    return raw.lstrip().startswith(b"{")


def error_of_body(raw: bytes) -> tuple[int, str]:
    """Return the gRPC code and the text of an error body, for every build of etcd."""
    try:
        return error_body(loads(raw))
    except UnavailableError:
        return 2, raw[:200].decode("utf-8", "replace")


# Calls that write nothing, so they may be repeated on another endpoint after any failure.
_HARMLESS = ("/kv/range", "/maintenance/status", "/auth/authenticate")
# etcd's errors are short texts.
_MAX_ERROR_BYTES = 2**16
# The gateway parses about ten megabytes of JSON a second, several times over, before etcd can refuse a large
# request. A call's time limit is for small requests, and this much is added for each byte.
_SECONDS_A_BYTE = 1e-6
# A stream that is silent for longer is opened again: etcd reports its progress every ten minutes or more often. That etcd
# itself is there is found out by calls, and that the connection is, by the kernel.
_SILENT_STREAM_S = 1200.0


class _Etcd3Client(AioClient):  # type: ignore[misc]  # etcd3-py has no types
    """etcd3-py's client with a constructor that does no I/O; used for raw calls only."""

    def __init__(self, base_url: str, session: aiohttp.ClientSession) -> None:
        # Not super().__init__(), which requests the version with a blocking call.
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


class JsonGateway:
    """Calls and streams over etcd's JSON gateway. Connects on first use."""

    def __init__(
        self,
        address: EtcdAddress,
        *,
        idle_s: float = IDLE_S,
        authentication: Authentication | None = None,
    ) -> None:
        self._address = address
        self._idle_s = idle_s
        self._heartbeat_s = min(HEARTBEAT_S, idle_s / 4)
        self._caller = EndpointCaller(address, self._authenticate, authentication)
        self._calls: aiohttp.ClientSession | None = None
        self._streams: aiohttp.ClientSession | None = None
        self._tls: ssl.SSLContext | None = None
        self._files = address.file_state()
        self._heard_at = float("-inf")

    async def close(self) -> None:
        await self._caller.close()
        for session in (self._calls, self._streams):
            if session is not None:
                await session.close()

    async def call(self, path: str, body: Json, *, limit_s: float = CALL_S) -> Json:
        """Return the answer of one unary call.

        Raises:
            StoreError: as `store.etcd.error_mapping.error_from_status` maps it.

        """
        return await self._caller.call(
            lambda token: self._exchange(path, body, limit_s, token), limit_s=limit_s
        )

    async def read(self, path: str, body: Json, *, limit_s: float = CALL_S, tries: int = 3) -> Json:
        """Return the answer of a call that may be repeated, on another endpoint or a fresh connection.

        Raises:
            StoreError: the last error.

        """
        return await self._caller.read(
            lambda token: self._exchange(path, body, limit_s, token), limit_s=limit_s, tries=tries
        )

    async def _exchange(self, path: str, body: Json, limit_s: float, token: str | None) -> Json:
        raw = orjson.dumps(body)
        total_s = limit_s + len(raw) * _SECONDS_A_BYTE
        timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=min(limit_s, CONNECT_S))
        headers = {"Content-Type": "application/json"}
        turn, route = self._caller.turn, self._route(self._session(), token)
        try:
            async with route.call_rpc(
                path,
                raw if len(raw) < 2**20 else io.BytesIO(raw),
                raw=True,
                timeout=timeout,
                headers=headers,
            ) as response:
                answer = await self._body(response)
                if response.status == 200:
                    exchange = loads(answer)
                    self._heard_at = asyncio.get_running_loop().time()
                    return exchange
                if response.status != 400 and not is_object(answer):
                    raise self._not_etcd(path, response.status)
                raise error_from_status(*error_of_body(answer))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._caller.rotate(turn)
            raise self._unreachable(error, limit_s) from error
        except UnavailableError:
            self._caller.rotate(turn)
            raise

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        """Return the body, up to the size that an answer of etcd may have."""
        limit = MAX_ANSWER_BYTES if response.status == 200 else _MAX_ERROR_BYTES
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > limit:
                raise too_large_error(str(self._address), limit)
        return bytes(body)

    def _not_etcd(self, path: str, status: int) -> UnavailableError:
        """Return the error for the answer of a web server or proxy; a server behind it may have applied a write."""
        return UnavailableError(
            f"etcd at {self._address}: HTTP {status}, and not an answer of etcd (a web server, or a "
            "proxy without etcd behind it?)",
            ambiguous=path not in _HARMLESS,
        )

    def _unreachable(self, error: BaseException, limit_s: float) -> UnavailableError:
        # Without a connection nothing was written.
        unconnected = isinstance(
            error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError
        )
        if isinstance(error, TimeoutError) and not unconnected:
            return slow_error(str(self._address), limit_s, ambiguous=True)
        text = str(error) or f"timed out ({type(error).__name__})"
        cause = getattr(error, "os_error", None)
        if isinstance(cause, ConnectionRefusedError):
            text = "connection refused"
        elif isinstance(cause, FileNotFoundError):
            text = "error: no such file or directory"
        return connection_error(str(self._address), text, ambiguous=not unconnected)

    async def _authenticate(self) -> str:
        body = {"name": self._address.username, "password": self._address.password}
        return str(
            field_at(
                await self._exchange("/auth/authenticate", body, AUTHENTICATE_S, None), "token"
            )
        )

    def _route(self, session: aiohttp.ClientSession, token: str | None) -> _Etcd3Client:
        urls = self._address.endpoints or ("http://localhost",)
        route = _Etcd3Client(urls[self._caller.turn % len(urls)].rstrip("/"), session)
        route.token = token
        return route

    def _session(self) -> aiohttp.ClientSession:
        if self._tls is not None:
            self._current_tls()
        if self._calls is None:
            self._calls = aiohttp.ClientSession(connector=self._connector(limit=AT_ONCE))
        return self._calls

    def _connector(self, *, limit: int, force_close: bool = False) -> aiohttp.BaseConnector:
        if self._address.socket is not None:
            return aiohttp.UnixConnector(
                str(self._address.socket), limit=limit, force_close=force_close
            )
        return aiohttp.TCPConnector(
            limit=limit,
            force_close=force_close,
            ssl=self._current_tls() or True,
            socket_factory=_kept_alive_socket,
        )

    def _current_tls(self) -> ssl.SSLContext | None:
        """Return the TLS context of all connections, with the files as they are now. Raises UnavailableError."""
        files = self._address.file_state()
        try:
            if self._tls is None:
                self._tls = self._address.ssl_context()
            elif files != self._files:
                self._address.reload(self._tls)
        except OSError as error:  # SSLError is one
            raise UnavailableError(
                f"etcd at {self._address}: the certificate files cannot be used: {error}"
            ) from error
        self._files = files
        return self._tls

    @asynccontextmanager
    async def stream(
        self, path: str, body: Json, headers: dict[str, str]
    ) -> AsyncGenerator[AsyncGenerator[bytes]]:
        """Open a stream of frames. An empty one says that there was none for a while, and that etcd is there."""
        if self._tls is not None:
            self._current_tls()
        if self._streams is None:
            # No limit: a watch must never wait for the connection of another one.
            self._streams = aiohttp.ClientSession(
                connector=self._connector(limit=0, force_close=True), read_bufsize=2**20
            )
        token = await self._caller.token()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CALL_S, sock_read=_SILENT_STREAM_S)
        turn, route = self._caller.turn, self._route(self._streams, token)
        headers = {"Content-Type": "application/json", **headers}
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self._idle_s):
                    response = await stack.enter_async_context(
                        route.call_rpc(
                            path, orjson.dumps(body), raw=True, timeout=timeout, headers=headers
                        )
                    )
                yield self._lines(response, turn)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._caller.rotate(turn)
            raise self._unreachable(error, self._idle_s) from error
        except UnauthenticatedError:
            self._caller.reject_token(token)
            raise
        except UnavailableError:
            self._caller.rotate(turn)
            raise

    async def _lines(self, response: aiohttp.ClientResponse, turn: int) -> AsyncGenerator[bytes]:
        """Yield frames, which are separated by newlines and may share or span chunks. `turn`: of the stream's endpoint.

        Raises:
            StoreError: the server refused or ended the stream, or a frame is too large.

        """
        if response.status != 200:
            code, text = error_of_body(await self._body(response))
            if is_refusal(text):
                raise error_from_status(code, text)
            raise UnavailableError(f"watch refused: {text} (code {code})")
        rest: list[bytes] = []
        held = 0
        while (chunk := await self._chunk(response.content, turn)) != b"":
            if chunk is None:
                yield b""
                continue
            held += len(chunk)
            if b"\n" not in chunk:
                rest.append(chunk)
                if held > MAX_ANSWER_BYTES:
                    raise too_large_error(str(self._address), MAX_ANSWER_BYTES)
                continue
            *lines, last = (b"".join(rest) + chunk).split(b"\n")
            rest, held = ([last], len(last)) if last else ([], 0)
            for line in lines:
                if line:
                    yield line
        raise UnavailableError("etcd ended the stream")

    async def _chunk(self, content: aiohttp.StreamReader, turn: int) -> bytes | None:
        """Return what comes next, empty at the end; None if nothing comes for a while and etcd is there.

        Raises:
            UnavailableError: etcd does not answer, or not at the endpoint of the stream.

        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._heartbeat_s):
                chunk = await content.readany()
        except TimeoutError:
            # The answer to any call is a sign of life.
            if loop.time() - self._heard_at >= self._heartbeat_s:
                await self.read("/maintenance/status", {}, limit_s=self._idle_s / 4, tries=2)
            if self._caller.turn != turn:
                # A frozen member keeps its connections: that another one answers says nothing of this stream.
                raise UnavailableError("etcd failed at the endpoint of the watch") from None
            return None
        self._heard_at = loop.time()
        return chunk


def _kept_alive_socket(address: AddrInfoType) -> socket.socket:
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    enable_keepalive(made)
    return made
