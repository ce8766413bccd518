"""The way to etcd: gRPC over TCP, TLS or a unix socket. With `stream`, the only importer of grpcio.

One connection per endpoint carries all calls and streams of a process.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import grpc
import grpc.aio

from store.errors import StoreError, UnavailableError
from store.etcd.address import EtcdAddress
from store.etcd.calls import CALL_S, CONNECT_S, IDLE_S, Calls
from store.etcd.grpc.methods import AUTHENTICATE, STATUS, Answer, Method, Request
from store.etcd.grpc.proto import etcd_pb2 as pb
from store.etcd.grpc.stream import Stream, error_of
from store.etcd.hints import explained

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
        self._made = Calls(address, self._authenticate)
        self._channels: dict[str, grpc.aio.Channel] = {}
        # Making a callable costs as much as a call.
        self._callables: dict[tuple[str, str], Any] = {}

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()
        self._callables.clear()

    async def call(
        self, method: Method[Request, Answer], request: Request, *, limit_s: float = CALL_S
    ) -> Answer:
        """Return the answer of one unary call.

        Raises:
            StoreError: as `store.etcd.meanings.exception_of` says.

        """
        return await self._made.make(
            lambda token: self._exchange(method, request, limit_s, token), limit_s=limit_s
        )

    async def _exchange(
        self, method: Method[Request, Answer], request: Request, limit_s: float, token: str | None
    ) -> Answer:
        turn, url = self._made.turn, self._url()
        try:
            await self._connected(url, min(limit_s, CONNECT_S))
            answer: Answer = await self._callable(url, method, "unary_unary")(
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
            raise UnavailableError(f"etcd at {url}: {no_answer}{explained(url, why)}") from error

    async def open(self, method: Method[Request, Answer]) -> Stream[Request, Answer]:
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
        self, method: Method[Request, Answer], request: Request, *, limit_s: float
    ) -> AsyncGenerator[Answer]:
        """Yield all answers to one request; each has to come in time. To be closed if left early.

        Raises:
            StoreError: the stream broke before its end, or an answer did not come in time.

        """
        token, url, blame = await self._turn()
        call = self._callable(url, method, "unary_stream")(request, metadata=_metadata(token))
        with closing(Stream[Request, Answer](call, f"etcd at {url}", blame)) as stream:
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

    def _callable(self, url: str, method: Method[Request, Answer], kind: str) -> Any:
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
