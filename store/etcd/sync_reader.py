"""A blocking reader of etcd's JSON gateway that imports almost nothing: for commands that read a few keys and exit.

It has no watches and no writes. Its HTTP/1.1 client is written by hand, because importing `http.client` costs a fifth
of the CPU time of `fleetctl get`; see docs/adr/0009-serialization.md. When it fails, the caller asks again
through `store.etcd.connect`, which knows more transports and explains errors to users.
"""

import json
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from machinery.clock import Clock
from store import reads
from store.errors import AuthOffError, LongListError, SlowStoreError, UnavailableError
from store.etcd.address import EtcdAddress
from store.etcd.error_mapping import error_from_status, slow_error
from store.etcd.json_values import (
    MAX_ANSWER_BYTES,
    Json,
    b64,
    error_body,
    field_at,
    key_value,
    not_etcd_error,
)
from store.keys import prefix_end
from store.reads import KeyValue, Listing

if TYPE_CHECKING:  # 20 ms, for TLS only
    from ssl import SSLContext

_CONNECT_S = 1.0
_CHUNK = 2**18
_LONGEST_HEAD = 2**16
_MOST_HEADERS = 100


class HttpResponse(NamedTuple):
    """A complete HTTP response."""

    status: int
    body: bytes
    is_last: bool
    """True if the server closes the connection after it."""


class ConnectionBrokenError(UnavailableError):
    """The connection broke, or the peer does not speak HTTP."""


class HttpConnection:
    """One connection to one member, with one request at a time; connects when it is created."""

    def __init__(
        self, address: EtcdAddress, url: str, clock: Clock, tls: "SSLContext | None"
    ) -> None:
        """Connect to the address's socket, or to one of its URLs.

        Raises:
            ConnectionBrokenError: the connection failed.

        """
        self._clock = clock
        self._host = "localhost" if address.socket else urlsplit(url).netloc
        try:
            self._socket = _open_socket(address, url, tls)
        except (OSError, ValueError) as error:
            raise ConnectionBrokenError(f"etcd at {url or address}: {error}") from error

    def close(self) -> None:
        self._socket.close()

    def post(self, path: str, body: bytes, headers: dict[str, str], limit_s: float) -> HttpResponse:
        """Send a request and return its response.

        Raises:
            ConnectionBrokenError: the response is not complete after `limit_s` seconds, or it is not HTTP.

        """
        until = self._clock.monotonic() + limit_s
        head = "".join(
            f"{name}: {value}\r\n"
            for name, value in {
                "Host": self._host,
                "Content-Type": "application/json",
                "Content-Length": str(len(body)),
                **headers,
            }.items()
        )
        try:
            self._socket.settimeout(limit_s)
            self._socket.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
            return _ResponseReader(lambda: self._received(until)).answer()
        except (OSError, ValueError) as error:
            raise ConnectionBrokenError(f"etcd at {self._host}: {error}") from error

    def _received(self, until: float) -> bytes:
        left = until - self._clock.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        self._socket.settimeout(left)
        found = self._socket.recv(_CHUNK)
        if not found:
            raise ConnectionResetError("the connection was closed in the middle of a response")
        return found


class _ResponseReader:
    """Parses a response from chunks of bytes."""

    def __init__(self, more: Callable[[], bytes]) -> None:
        self._more = more
        self._rest = bytearray()

    def answer(self) -> HttpResponse:
        """Return the next response.

        Raises:
            OSError: it did not arrive; ValueError: it is not HTTP.

        """
        version, _, rest = self._line().partition(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError("the server does not speak HTTP")
        status = int(rest[:3])
        headers: dict[str, str] = {}
        while line := self._line():
            if len(headers) >= _MOST_HEADERS:
                raise ValueError("the response has too many headers")
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip().lower()
        is_last = version == "HTTP/1.0" or headers.get("connection") == "close"
        if headers.get("transfer-encoding") == "chunked":
            return HttpResponse(status, self._chunks(), is_last=is_last)
        length = headers.get("content-length", "")
        if not length.isdecimal():
            raise ValueError("the response has no length")
        _check_length(int(length))
        return HttpResponse(status, self._exactly(int(length)), is_last=is_last)

    def _line(self) -> str:
        while (end := self._rest.find(b"\r\n")) < 0:
            if len(self._rest) > _LONGEST_HEAD:
                raise ValueError("the server does not speak HTTP")
            self._rest += self._more()
        line = self._rest[:end].decode("latin-1")
        del self._rest[: end + 2]
        return line

    def _exactly(self, length: int) -> bytes:
        while len(self._rest) < length:
            self._rest += self._more()
        found = bytes(self._rest[:length])
        del self._rest[:length]
        return found

    def _chunks(self) -> bytes:
        found: list[bytes] = []
        size = 0
        while length := int(self._line().partition(";")[0], 16):
            size += length
            _check_length(length)
            _check_length(size)
            found.append(self._exactly(length))
            self._line()
        for _ in range(_MOST_HEADERS):
            if not self._line():
                return b"".join(found)
        raise ValueError("the response has too many trailers")


def _check_length(length: int) -> None:
    """Raise ValueError if the body, or a part of it, is larger than an answer of etcd."""
    if not 0 <= length <= MAX_ANSWER_BYTES:
        raise ValueError(f"an answer of {length} bytes")


def _open_socket(address: EtcdAddress, url: str, tls: "SSLContext | None") -> socket.socket:
    if address.socket is not None:
        unix_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            unix_socket.settimeout(_CONNECT_S)
            unix_socket.connect(str(address.socket))
        except OSError:
            unix_socket.close()
            raise
        return unix_socket
    parts = urlsplit(url)
    plain = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=_CONNECT_S)
    with suppress(OSError):
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if parts.scheme != "https" or tls is None:
        return plain
    try:
        return tls.wrap_socket(plain, server_hostname=parts.hostname)
    except OSError:
        plain.close()
        raise


T = TypeVar("T")

# Time limits as in the other adapters: for a call, and for one page of a list.
_CALL_S, _LIST_S = 2.0, 5.0
# As `store.etcd.authentication.AUTHENTICATE_S`, whose import is expensive: a busy etcd needs seconds for a password.
_AUTHENTICATE_S = 10.0


def run_sync(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that awaits nothing but a `SyncReader`, and return its result."""
    try:
        main.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    main.close()
    raise RuntimeError("the coroutine waits for an event loop; it may only await a SyncReader")


class SyncReader:
    """`store.reads.StoreReader` over etcd's JSON gateway, without an event loop. Close it after use.

    Its methods are coroutines, as the protocol requires, but never wait for an event loop: `run_sync` runs them.
    """

    def __init__(
        self, address: EtcdAddress, clock: Clock, *, longest_list: int | None = None
    ) -> None:
        """`longest_list` is the number of keys beyond which `list` raises `LongListError` after the first page."""
        self._address = address
        self._clock = clock
        self._longest_list = longest_list
        self._urls = [url.rstrip("/") for url in address.endpoints] or [""]
        self._connection: HttpConnection | None = None
        self._token: str | None = None
        self._has_asked = not address.username

    async def get(self, key: str) -> KeyValue | None:
        """Return the current value of the key (linearizable); None if it does not exist."""
        answer = self._call("/kv/range", {"key": b64(self._address.prefix + key)}, _CALL_S)
        found = answer.get("kvs", ())
        return self._inside(key_value(found[0])) if found else None

    async def list(self, prefix: str) -> Listing:
        """Return every key that begins with `prefix`, all as of one revision.

        Raises:
            LongListError: there are more than `longest_list`.
            StoreError: no answer.

        """
        return await reads.collect(lambda: self.pages(prefix))

    def pages(self, prefix: str) -> AsyncGenerator[Listing]:
        """Yield the same in pages, all as of the first page's revision; raises as `list` does."""
        start = self._address.prefix + prefix
        range_end = b64(prefix_end(start))

        async def fetch(*, start: str, revision: int, limit: int) -> reads.Page:
            body = {
                "key": b64(start),
                "range_end": range_end,
                "limit": limit,
                "revision": str(revision),
            }
            answer = self._call("/kv/range", body, _LIST_S)
            if self._longest_list is not None and int(answer.get("count", 0)) > self._longest_list:
                raise LongListError(f"more than {self._longest_list} keys")
            return reads.Page(
                items=tuple([key_value(tree) for tree in answer.get("kvs", ())]),
                revision=int(field_at(answer, "header", "revision")),
                store=str(field_at(answer, "header", "cluster_id")),
                more=bool(answer.get("more")),
            )

        return self._inside_pages(reads.pages(start, fetch))

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _inside_pages(self, pages: AsyncGenerator[Listing]) -> AsyncGenerator[Listing]:
        async with aclosing(pages):
            async for page in pages:
                items = tuple([self._inside(item) for item in page.items])
                yield Listing(revision=page.revision, items=items, store=page.store)

    def _inside(self, item: KeyValue) -> KeyValue:
        prefix = self._address.prefix
        return item._replace(key=item.key.removeprefix(prefix)) if prefix else item

    def _call(self, path: str, body: Json, limit_s: float) -> Json:
        """Return the answer of the first member that answers.

        Raises:
            StoreError: none answered, or one refused.

        """
        for turn in range(len(self._urls)):
            try:
                return self._ask(path, body, limit_s)
            except SlowStoreError:
                raise
            except UnavailableError:
                self.close()
                self._urls.append(self._urls.pop(0))
                if turn == len(self._urls) - 1:
                    raise
        raise AssertionError("unreachable")

    def _ask(self, path: str, body: Json, limit_s: float) -> Json:
        if not self._has_asked:
            self._token = self._authenticated()
            self._has_asked = True
        return self._exchange(path, body, limit_s)

    def _authenticated(self) -> str | None:
        credentials = {"name": self._address.username, "password": self._address.password}
        try:
            answer = self._exchange("/auth/authenticate", credentials, _AUTHENTICATE_S)
            return str(field_at(answer, "token"))
        except AuthOffError:
            return None
        except ConnectionBrokenError as error:
            if not isinstance(error.__cause__, TimeoutError) or self._connection is None:
                raise
            # Another request for a token would only cost etcd another bcrypt.
            self.close()
            raise slow_error(str(self._address), _AUTHENTICATE_S, "to the password") from error

    def _exchange(self, path: str, body: Json, limit_s: float) -> Json:
        if self._connection is None:
            self._connection = self._connected()
        headers = {} if self._token is None else {"Authorization": self._token}
        raw = json.dumps(body).encode()
        answer = self._connection.post(f"/v3{path}", raw, headers, limit_s)
        if answer.is_last:
            self.close()
        tree = _parse_json(answer.body)
        if answer.status != 200:
            raise error_from_status(*error_body(tree))
        return tree

    def _connected(self) -> HttpConnection:
        try:
            tls = self._address.ssl_context()
        except OSError as error:  # SSLError is one
            raise ConnectionBrokenError(f"the certificate files cannot be used: {error}") from error
        return HttpConnection(self._address, self._urls[0], self._clock, tls)


def _parse_json(raw: bytes) -> Json:
    try:
        tree = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise not_etcd_error(raw) from error
    if not isinstance(tree, dict):
        raise not_etcd_error(raw)
    return tree
