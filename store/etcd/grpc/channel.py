"""A stream to one endpoint, and what gRPC's failures mean to us.

The way to etcd: gRPC over TCP, TLS or a unix socket. With `stream`, the only importer of grpcio.

One connection per endpoint carries all calls and streams of a process.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import closing
from typing import Any, Generic, cast
from urllib.parse import urlsplit

import grpc
import grpc.aio

from store.errors import StoreError, UnavailableError
from store.etcd.adapter import CALL_S, CONNECT_S, IDLE_S, EndpointCaller
from store.etcd.address import EtcdAddress
from store.etcd.error_mapping import error_from_status, explain_connection_error
from store.etcd.grpc.proto import etcd_pb2 as pb
from store.etcd.grpc.wire import AUTHENTICATE, STATUS, Method, Request, Response

# What grpc itself says of connections that broke ("Internal error from Core", "Channel closed").
_BROKEN = (grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED)


class Stream(Generic[Request, Response]):
    """A stream to one endpoint: requests there, answers back. To be closed."""

    def __init__(
        self,
        call: "grpc.aio.StreamStreamCall[Request, Response]",
        where: str,
        blame: Callable[[], None],
    ) -> None:
        self._call = call
        self._where = where
        self._blame = blame

    async def send(self, request: Request, *, limit_s: float = CALL_S) -> None:
        """Send a request.

        Raises:
            StoreError: the stream broke, or the request did not go away in time.

        """
        try:
            async with asyncio.timeout(limit_s):
                await self._call.write(request)
        except TimeoutError as error:
            raise self.failure(f"a request did not go away in {limit_s:g} s") from error
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise self._error_of(error) from error

    async def receive(self, *, limit_s: float) -> Response:
        """Return the next answer.

        Raises:
            StoreError: the stream broke or ended, or nothing came in time.

        """
        answer = await self.next(limit_s=limit_s)
        if answer is None:
            raise self.failure("the stream ended")
        return answer

    async def next(self, *, limit_s: float) -> Response | None:
        """Return the next answer; None if the server says that there is none any more.

        Raises:
            StoreError: the stream broke, or nothing came in time.

        """
        try:
            async with asyncio.timeout(limit_s):
                answer = await self._call.read()
        except TimeoutError as error:
            raise self.failure(f"nothing heard for {limit_s:g} s") from error
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise self._error_of(error) from error
        return None if answer is grpc.aio.EOF else cast("Response", answer)

    def failure(self, what: str) -> UnavailableError:
        """Return the error for a stream that is of no use any more; the next one goes elsewhere."""
        self._blame()
        return UnavailableError(f"{self._where}: {what}")

    def _error_of(self, error: BaseException) -> StoreError:
        self._blame()
        return error_of(error, self._where)

    def close(self) -> None:
        self._call.cancel()


def error_of(error: BaseException, where: str) -> StoreError:
    """Return our error for grpc's; what was sent and not answered may have been done."""
    if isinstance(error, grpc.aio.AioRpcError):
        found = error_from_status(error.code().value[0], str(error.details()))
        if not isinstance(found, UnavailableError) and error.code() not in _BROKEN:
            return found
        return UnavailableError(f"{where}: {error.details()}", ambiguous=True)
    what = str(error) or type(error).__name__
    return UnavailableError(f"{where}: {what}", ambiguous=True)


# https://grpc.github.io/grpc/core/group__grpc__arg__keys.html
_OPTIONS: tuple[tuple[str, int | str], ...] = (
    # A page of large objects is more than the 4 MiB that a client takes by default.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Each transport has a connection of its own, and closes it.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", int(CONNECT_S * 1000)),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # etcd ends connections that ask more often than every 5 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Without it a connection that stands still is never given up: every call on it fails for ever.
    ("grpc.http2.ping_timeout_ms", 3_000),
)
# A socket's path is no name that a server takes for its own.
_SOCKET_OPTIONS = (*_OPTIONS, ("grpc.default_authority", "localhost"))
# Without this a stream to a member that lost its leader would stay open and silent.
_NEEDS_LEADER = (("hasleader", "true"),)

Metadata = tuple[tuple[str, str], ...]


class GrpcChannel:
    """Calls and streams to the etcd at an address. Connects when first used."""

    def __init__(self, address: EtcdAddress, *, idle_s: float = IDLE_S) -> None:
        self._address = address
        self.idle_s = idle_s
        self._made = EndpointCaller(address, self._authenticate)
        self._channels: dict[str, grpc.aio.Channel] = {}
        # Making a callable costs as much as a call.
        self._callables: dict[tuple[str, str], Any] = {}

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()
        self._callables.clear()

    async def call(
        self, method: Method[Request, Response], request: Request, *, limit_s: float = CALL_S
    ) -> Response:
        """Return the answer of one unary call.

        Raises:
            StoreError: as `store.etcd.error_mapping.error_from_status` says.

        """
        return await self._made.make(
            lambda token: self._exchange(method, request, limit_s, token), limit_s=limit_s
        )

    async def _exchange(
        self, method: Method[Request, Response], request: Request, limit_s: float, token: str | None
    ) -> Response:
        turn, url = self._made.turn, self._url()
        try:
            await self._connected(url, min(limit_s, CONNECT_S))
            answer: Response = await self._callable(url, method, "unary_unary")(
                request, timeout=limit_s, metadata=_metadata(token)
            )
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise self._failure(error, turn, url) from error
        except UnavailableError:
            self._made.pass_on(turn)
            raise
        return answer

    def _failure(self, error: BaseException, turn: int, url: str) -> StoreError:
        """Return our error for grpc's.

        Not in a variable of who raises it: its traceback would hold the frame, the frame the call,
        and the call the connection, also after `close()`, until the garbage collector comes by.
        """
        found = error_of(error, f"etcd at {url}")
        if isinstance(found, UnavailableError):
            self._made.pass_on(turn)
        return found

    async def _connected(self, url: str, limit_s: float) -> None:
        """Wait until there is a connection, so that what fails here was certainly not sent."""
        channel = self._channel(url)
        state = channel.get_state(try_to_connect=True)
        if state is grpc.ChannelConnectivity.READY:
            return
        try:
            async with asyncio.timeout(limit_s):
                while state is not grpc.ChannelConnectivity.READY:
                    if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                        await self._explain(url)
                    else:
                        await channel.wait_for_state_change(state)
                    state = channel.get_state(try_to_connect=True)
        except TimeoutError as error:
            raise UnavailableError(f"etcd at {url}: no connection in {limit_s:g} s") from error

    async def _explain(self, url: str) -> None:
        """Raise why there is no connection: grpc says it only to a call, so ask what harms nothing."""
        try:
            await self._callable(url, STATUS, "unary_unary")(pb.Empty(), timeout=CONNECT_S)
        except grpc.aio.AioRpcError as error:
            why = str(error.details()).rpartition("last error: ")[2].removeprefix("UNKNOWN: ")
            no_answer = "no answer: " if "timed out" in why else ""
            raise UnavailableError(
                f"etcd at {url}: {no_answer}{explain_connection_error(url, why)}"
            ) from error

    async def open(self, method: Method[Request, Response]) -> Stream[Request, Response]:
        """Open a stream of requests and answers to whose turn it is.

        Raises:
            StoreError: there is no connection, or no token.

        """
        token, url, blame = await self._turn()
        call = self._callable(url, method, "stream_stream")(
            metadata=(*_metadata(token), *_NEEDS_LEADER)
        )
        return Stream(call, f"etcd at {url}", blame)

    async def answers(
        self, method: Method[Request, Response], request: Request, *, limit_s: float
    ) -> AsyncGenerator[Response]:
        """Yield all answers to one request; each has to come in time. To be closed if left early.

        Raises:
            StoreError: the stream broke before its end, or an answer did not come in time.

        """
        token, url, blame = await self._turn()
        call = self._callable(url, method, "unary_stream")(request, metadata=_metadata(token))
        with closing(Stream[Request, Response](call, f"etcd at {url}", blame)) as stream:
            while (answer := await stream.next(limit_s=limit_s)) is not None:
                yield answer

    async def _turn(self) -> tuple[str | None, str, Callable[[], None]]:
        """Return a token, whose turn it is (connected), and how to say that a stream to it broke."""
        token = await self._made.token()
        turn, url = self._made.turn, self._url()
        try:
            await self._connected(url, CONNECT_S)
        except UnavailableError:
            self._made.pass_on(turn)
            raise

        def blame() -> None:
            self._made.pass_on(turn)
            self._made.forget(token)  # it may be stale; some etcds cancel such a watch as denied

        return token, url, blame

    async def _authenticate(self) -> str:
        request = pb.AuthenticateRequest(
            name=self._address.username, password=self._address.password
        )
        return (await self._exchange(AUTHENTICATE, request, CALL_S, None)).token

    def _url(self) -> str:
        if self._address.socket is not None:
            return f"unix:{self._address.socket}"
        urls = self._address.endpoints
        return urls[self._made.turn % len(urls)]

    def _callable(self, url: str, method: Method[Request, Response], kind: str) -> Any:
        made = self._callables.get((url, method.path))
        if made is None:
            made = getattr(self._channel(url), kind)(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.answer.FromString,
            )
            self._callables[url, method.path] = made
        return made

    def _channel(self, url: str) -> grpc.aio.Channel:
        found = self._channels.get(url)
        if found is None:
            found = self._channels[url] = self._open(url)
        return found

    def _open(self, url: str) -> grpc.aio.Channel:
        """Return a channel; it does not connect yet."""
        if url.startswith("unix:"):
            return grpc.aio.insecure_channel(url, options=_SOCKET_OPTIONS)
        parts = urlsplit(url)
        if parts.scheme == "http":
            return grpc.aio.insecure_channel(parts.netloc, options=_OPTIONS)
        return grpc.aio.secure_channel(parts.netloc, self._credentials(), options=_OPTIONS)

    def _credentials(self) -> grpc.ChannelCredentials:
        try:
            # grpc says nothing of files that make no sense; Python's ssl does.
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
