"""gRPC connections to etcd over TCP, TLS or a unix socket: calls and streams. The only importer of grpcio.

One connection per endpoint carries all calls and streams of a process.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast
from urllib.parse import urlsplit

import grpc
import grpc.aio

from store.errors import SlowStoreError, StoreError, UnauthenticatedError, UnavailableError
from store.etcd.adapter import CALL_S, CONNECT_S, IDLE_S, EndpointCaller
from store.etcd.address import EtcdAddress, FileState
from store.etcd.authentication import AUTHENTICATE_S, Authentication
from store.etcd.error_mapping import connection_error, error_from_status, slow_error
from store.etcd.grpc.proto import etcd_pb2 as pb
from store.etcd.grpc.wire import AUTHENTICATE, STATUS, Method, Request, Response
from store.etcd.json_values import MAX_ANSWER_BYTES

_TOO_LATE = grpc.StatusCode.DEADLINE_EXCEEDED
# grpc's own codes for broken connections ("Internal error from Core", "Channel closed").
_BROKEN = (grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED)


@dataclass(slots=True)
class _EndpointState:
    """Signs of life of one endpoint."""

    heard_at: float = float("-inf")
    """The time of its last answer, on the event loop's clock."""


class Stream(Generic[Request, Response]):
    """A stream of requests and responses to one endpoint. Close it after use."""

    def __init__(
        self,
        call: "grpc.aio.StreamStreamCall[Request, Response]",
        where: str,
        blame: Callable[[StoreError], None],
        accept: Callable[[], None],
        endpoint: _EndpointState,
    ) -> None:
        """`blame` is called with the error that broke the stream, `accept` when etcd has answered on it."""
        self._open_call: grpc.aio.StreamStreamCall[Request, Response] | None = call
        self._where = where
        self._blame = blame
        self._accept = accept
        self._endpoint = endpoint

    def heard_at(self) -> float:
        """Return when the endpoint last answered anything, on any stream or call, on the event loop's clock."""
        return self._endpoint.heard_at

    async def send(self, request: Request, *, limit_s: float = CALL_S) -> None:
        """Send a request.

        Raises:
            StoreError: the stream broke, or the request was not sent in time.

        """
        try:
            async with asyncio.timeout(limit_s):
                await self._call().write(request)
        except TimeoutError as error:
            why = self.failure(f"a request was not sent in {limit_s:g} s")
            raise why from _without_frames(error)
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise self._error_of(error) from _without_frames(error)
        except asyncio.CancelledError as error:
            raise _without_frames(error)  # noqa: B904 - the same error

    async def receive(self, *, limit_s: float) -> Response:
        """Return the next answer.

        Raises:
            StoreError: the stream broke or ended, or nothing arrived in time.

        """
        answer = await self.next(limit_s=limit_s)
        if answer is None:
            raise self.failure("the stream ended")
        return answer

    async def next(self, *, limit_s: float | None = None) -> Response | None:
        """Return the next answer; None at the end of the stream. A cancelled or late read breaks the stream.

        Raises:
            StoreError: the stream broke, or nothing arrived in time.

        """
        try:
            async with asyncio.timeout(limit_s):
                answer = await self._call().read()
        except TimeoutError as error:
            why = self.failure(f"nothing received for {limit_s:g} s")
            raise why from _without_frames(error)
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise self._error_of(error) from _without_frames(error)
        except asyncio.CancelledError as error:
            raise _without_frames(error)  # noqa: B904 - the same error
        if answer is grpc.aio.EOF:
            return None
        self._endpoint.heard_at = asyncio.get_running_loop().time()
        self._accept()
        return cast("Response", answer)

    def failure(self, what: str) -> UnavailableError:
        """Return the error for a broken stream; the next stream goes to another endpoint."""
        error = UnavailableError(f"{self._where}: {what}")
        self._blame(error)
        return error

    def _error_of(self, error: BaseException) -> StoreError:
        store_error = error_of(error, self._where)
        self._blame(store_error)
        return store_error

    def _call(self) -> "grpc.aio.StreamStreamCall[Request, Response]":
        if self._open_call is None:
            raise self.failure("the stream is closed")
        return self._open_call

    def close(self) -> None:
        """End the stream. What still refers to it, like the traceback of an error, does not keep the connection."""
        call, self._open_call = self._open_call, None
        if call is not None:
            call.cancel()


Raised = TypeVar("Raised", bound=BaseException)


def _without_frames(error: Raised) -> Raised:
    """Return the error; it and its causes lose their tracebacks.

    grpc's frames hold the call, and a call holds the connection, even after `close()`. An error may live long:
    that of a `TaskGroup` refers to itself until the garbage collector runs.
    """
    base_exception: BaseException | None = error
    while base_exception is not None:
        base_exception.__traceback__ = None
        base_exception = base_exception.__cause__ or base_exception.__context__
    return error


def error_of(error: BaseException, where: str) -> StoreError:
    """Return the error for grpc's; a request without an answer may have been applied."""
    if isinstance(error, grpc.aio.AioRpcError):
        store_error = error_from_status(error.code().value[0], str(error.details()))
        if not isinstance(store_error, UnavailableError) and error.code() not in _BROKEN:
            return store_error
        return UnavailableError(f"{where}: {error.details()}", ambiguous=True)
    what = str(error) or type(error).__name__
    return UnavailableError(f"{where}: {what}", ambiguous=True)


# https://grpc.github.io/grpc/core/group__grpc__arg__keys.html
_OPTIONS: tuple[tuple[str, int | str], ...] = (
    # A page of large objects exceeds the client's default of 4 MiB.
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    ("grpc.max_send_message_length", -1),
    # Each transport has its own connection, and closes it.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", int(CONNECT_S * 1000)),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Without it grpc pings etcd after nearly every answer, to estimate how much may be on its way: as many bytes as the
    # renewals of a lease. A fixed window suits pages of a few megabytes.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 4 * 2**20),
    # etcd closes connections that send pings more often than every 5 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Without it a frozen connection is never given up, and every call on it fails.
    ("grpc.http2.ping_timeout_ms", 3_000),
)
# All calls share a connection. With 32, as over HTTP, 64 callers spent a fifth of their CPU time on waiting for a slot.
_AT_ONCE = 128
# A socket's path is not a valid authority.
_SOCKET_OPTIONS = (*_OPTIONS, ("grpc.default_authority", "localhost"))
# Without it a stream to a member that lost its leader would stay open and silent.
_NEEDS_LEADER = (("hasleader", "true"),)

Metadata = tuple[tuple[str, str], ...]


class GrpcChannel:
    """Calls and streams to the etcd at an address. Connects on first use."""

    def __init__(
        self,
        address: EtcdAddress,
        *,
        idle_s: float = IDLE_S,
        authentication: Authentication | None = None,
    ) -> None:
        self._address = address
        self.idle_s = idle_s
        self._caller = EndpointCaller(address, self._authenticate, authentication, at_once=_AT_ONCE)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._files: dict[str, FileState] = {}
        """The TLS files that each channel was opened with."""
        self._retired: list[grpc.aio.Channel] = []
        self._states: defaultdict[str, _EndpointState] = defaultdict(_EndpointState)
        # Creating a callable costs as much as a call.
        self._callables: dict[tuple[str, str], Any] = {}

    async def close(self) -> None:
        await self._caller.close()
        for channel in (*self._channels.values(), *self._retired):
            await channel.close()
        self._channels.clear()
        self._retired.clear()
        self._callables.clear()

    async def call(
        self, method: Method[Request, Response], request: Request, *, limit_s: float = CALL_S
    ) -> Response:
        """Return the answer of one unary call.

        Raises:
            StoreError: as `store.etcd.error_mapping.error_from_status` maps it.

        """
        return await self._caller.call(
            lambda token: self._exchange(method, request, limit_s, token), limit_s=limit_s
        )

    async def read(
        self,
        method: Method[Request, Response],
        request: Request,
        *,
        limit_s: float = CALL_S,
        tries: int = 3,
    ) -> Response:
        """Return the answer of a call that may be repeated, on another endpoint or a fresh connection.

        Raises:
            StoreError: the last error.

        """
        return await self._caller.read(
            lambda token: self._exchange(method, request, limit_s, token),
            limit_s=limit_s,
            tries=tries,
        )

    async def _exchange(
        self, method: Method[Request, Response], request: Request, limit_s: float, token: str | None
    ) -> Response:
        turn, url = self._caller.turn, self._url()
        try:
            if not self._is_connected(url):
                await self._connect(url, min(limit_s, CONNECT_S))
            answer: Response = await self._callable(url, method, "unary_unary")(
                request, timeout=limit_s, metadata=_metadata(token)
            )
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise self._failure(error, turn, url, limit_s) from _without_frames(error)
        except asyncio.CancelledError as error:
            raise _without_frames(error)  # noqa: B904 - the same error
        except UnavailableError:
            self._caller.rotate(turn)
            raise
        self._states[url].heard_at = asyncio.get_running_loop().time()
        return answer

    def _failure(self, error: BaseException, turn: int, url: str, limit_s: float) -> StoreError:
        store_error = error_of(error, f"etcd at {url}")
        if isinstance(store_error, UnavailableError):
            self._caller.rotate(turn)
        if isinstance(error, grpc.aio.AioRpcError) and error.code() is _TOO_LATE:
            return slow_error(url, limit_s, ambiguous=True)
        return store_error

    def _is_connected(self, url: str) -> bool:
        """Return whether there is a connection; begin to connect if there is none."""
        state = self._channel(url).get_state(try_to_connect=True)
        return state is grpc.ChannelConnectivity.READY

    async def _connect(self, url: str, limit_s: float) -> None:
        """Wait for a connection, so that a failure here means that nothing was sent."""
        channel = self._with_current_files(url)
        state = channel.get_state(try_to_connect=True)
        try:
            async with asyncio.timeout(limit_s):
                while state is not grpc.ChannelConnectivity.READY:
                    if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                        await self._explain(url)
                    else:
                        await channel.wait_for_state_change(state)
                    state = channel.get_state(try_to_connect=True)
        except TimeoutError as error:
            raise SlowStoreError(
                f"no answer from etcd at {url} within {limit_s:g} s: it is slow, or its machine cannot be reached"
            ) from _without_frames(error)

    def _with_current_files(self, url: str) -> grpc.aio.Channel:
        """Return the channel, which has no connection; another one if its certificates were replaced since it was opened.

        grpc reads them once, and every certificate of a fleet is replaced before it ends.
        """
        if self._files[url] == self._address.file_state():
            return self._channels[url]
        # Others may wait for it, so it is closed at the end.
        self._retired.append(self._channels.pop(url))
        for key in [key for key in self._callables if key[0] == url]:
            del self._callables[key]
        return self._channel(url)

    async def _explain(self, url: str) -> None:
        """Raise the cause of a missing connection: grpc reports it to calls only, so make a harmless one."""
        try:
            await self._callable(url, STATUS, "unary_unary")(pb.Empty(), timeout=CONNECT_S)
        except grpc.aio.AioRpcError as error:
            why = str(error.details()).rpartition("last error: ")[2].removeprefix("UNKNOWN: ")
            raise connection_error(url, why) from _without_frames(error)

    async def ready(self) -> None:
        """Wait for a connection and a token, so that `open` succeeds at once; raises as it does."""
        await self._caller.token()
        turn, url = self._caller.turn, self._url()
        try:
            if not self._is_connected(url):
                await self._connect(url, CONNECT_S)
        except UnavailableError:
            self._caller.rotate(turn)
            raise

    async def open(self, method: Method[Request, Response]) -> Stream[Request, Response]:
        """Open a stream of requests and answers to the current endpoint.

        Raises:
            StoreError: there is no connection, or no token.

        """
        return await self._stream(
            lambda url, token: self._callable(url, method, "stream_stream")(
                metadata=(*_metadata(token), *_NEEDS_LEADER)
            )
        )

    async def answers(
        self, method: Method[Request, Response], request: Request, *, limit_s: float
    ) -> AsyncGenerator[Response]:
        """Yield all answers to one request, each within the time limit. Close the generator when leaving early.

        Raises:
            StoreError: the stream broke before its end, or an answer did not arrive in time.

        """
        opened: Stream[Request, Response] = await self._stream(
            lambda url, token: self._callable(url, method, "unary_stream")(
                request, metadata=_metadata(token)
            )
        )
        with closing(opened) as stream:
            while (answer := await stream.next(limit_s=limit_s)) is not None:
                yield answer

    async def _stream(self, begin: Callable[[str, str | None], Any]) -> Stream[Request, Response]:
        """Begin a stream at the current endpoint, with a token."""
        token = await self._caller.token()
        turn, url = self._caller.turn, self._url()
        try:
            if not self._is_connected(url):
                await self._connect(url, CONNECT_S)
        except UnavailableError:
            self._caller.rotate(turn)
            raise

        def blame(error: StoreError) -> None:
            self._caller.rotate(turn)
            # A broken connection says nothing about the token.
            if isinstance(error, UnauthenticatedError):
                self._caller.reject_token(token)

        return Stream(
            begin(url, token),
            f"etcd at {url}",
            blame,
            lambda: self._caller.accept_token(token),
            self._states[url],
        )

    async def _authenticate(self) -> str:
        request = pb.AuthenticateRequest(
            name=self._address.username, password=self._address.password
        )
        return (await self._exchange(AUTHENTICATE, request, AUTHENTICATE_S, None)).token

    def _url(self) -> str:
        if self._address.socket is not None:
            return f"unix:{self._address.socket}"
        urls = self._address.endpoints
        return urls[self._caller.turn % len(urls)]

    def _callable(self, url: str, method: Method[Request, Response], kind: str) -> Any:
        created = self._callables.get((url, method.path))
        if created is None:
            created = getattr(self._channel(url), kind)(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.answer.FromString,
            )
            self._callables[url, method.path] = created
        return created

    def _channel(self, url: str) -> grpc.aio.Channel:
        channel = self._channels.get(url)
        if channel is None:
            self._files[url] = self._address.file_state()
            channel = self._channels[url] = self._open(url)
        return channel

    def _open(self, url: str) -> grpc.aio.Channel:
        """Return a channel that is not connected yet."""
        if url.startswith("unix:"):
            return grpc.aio.insecure_channel(url, options=_SOCKET_OPTIONS)
        parts = urlsplit(url)
        if parts.scheme == "http":
            return grpc.aio.insecure_channel(parts.netloc, options=_OPTIONS)
        return grpc.aio.secure_channel(parts.netloc, self._credentials(), options=_OPTIONS)

    def _credentials(self) -> grpc.ChannelCredentials:
        try:
            # grpc does not report invalid files; Python's ssl does.
            self._address.ssl_context()
            ca, certificate, key = (
                path.read_bytes() if path is not None else None
                for path in (self._address.ca, self._address.certificate, self._address.key)
            )
        except OSError as error:  # SSLError is one
            raise UnavailableError(
                f"etcd at {self._address}: the certificate files cannot be used: {error}"
            ) from error
        return grpc.ssl_channel_credentials(ca, key or certificate, certificate)


def _metadata(token: str | None) -> Metadata:
    return () if token is None else (("token", token),)
