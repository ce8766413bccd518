"""etcd for whoever asks once and goes: looks, blocks, and imports next to nothing. Knows no watch, no write.

HTTP/1.1 over one socket, as far as etcd's JSON gateway needs it: a POST, its answer, the next. Blocks.

`http.client` would do the same, after importing a parser of e-mail: a quarter of the time that
`fleetctl get` has.

The adapter that only looks: `store.port.Reads` over etcd's JSON gateway, without an event loop.

Its functions are coroutines like the port's, and never wait for one: `drive` runs whatever is built of
them. It says little about what went wrong; who gets an error asks again by `store.etcd.connect`, whose
adapters know more ways, and the words for people.
"""

import json
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from machinery.clock import Clock
from store import reads
from store.errors import AuthOffError, UnavailableError
from store.etcd.address import EtcdAddress
from store.etcd.error_mapping import error_from_status
from store.etcd.json_values import Json, b64, error_body, field_at, key_value, not_etcd_error
from store.keys import prefix_end
from store.reads import KeyValue, Listing

if TYPE_CHECKING:  # 20 ms, for those who speak TLS
    from ssl import SSLContext

_CONNECT_S = 1.0
_CHUNK = 2**18
_LONGEST_HEAD = 2**16


class HttpResponse(NamedTuple):
    """An HTTP answer, whole."""

    status: int
    body: bytes
    is_last: bool
    """Whether the other side hangs up after it."""


class ConnectionBrokenError(UnavailableError):
    """The connection broke, or what came over it is no HTTP."""


class HttpConnection:
    """One connection to one member; opens when it is made."""

    def __init__(
        self, address: EtcdAddress, url: str, clock: Clock, tls: "SSLContext | None"
    ) -> None:
        """Connect to the address's socket, or to one of its URLs.

        Raises:
            BrokenError: nobody answers there.

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
        """Send a request and return what came back.

        Raises:
            BrokenError: not all of it came in `limit_s` seconds, or it is no HTTP.

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
            raise ConnectionResetError("it hung up in the middle of an answer")
        return found


class _ResponseReader:
    """What comes in, cut into lines and lengths."""

    def __init__(self, more: Callable[[], bytes]) -> None:
        self._more = more
        self._rest = bytearray()

    def answer(self) -> HttpResponse:
        """Return the next answer.

        Raises:
            OSError: it did not come; ValueError: it is no HTTP.

        """
        version, _, rest = self._line().partition(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError("what answers there speaks no HTTP")
        status = int(rest[:3])
        headers: dict[str, str] = {}
        while line := self._line():
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip().lower()
        is_last = version == "HTTP/1.0" or headers.get("connection") == "close"
        if headers.get("transfer-encoding") == "chunked":
            return HttpResponse(status, self._chunks(), is_last=is_last)
        length = headers.get("content-length", "")
        if not length.isdecimal():
            raise ValueError("its answer does not say how long it is")
        return HttpResponse(status, self._exactly(int(length)), is_last=is_last)

    def _line(self) -> str:
        while (end := self._rest.find(b"\r\n")) < 0:
            if len(self._rest) > _LONGEST_HEAD:
                raise ValueError("what answers there speaks no HTTP")
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
        while length := int(self._line().partition(";")[0], 16):
            found.append(self._exactly(length))
            self._line()
        while self._line():  # trailers
            pass
        return b"".join(found)


def _open_socket(address: EtcdAddress, url: str, tls: "SSLContext | None") -> socket.socket:
    if address.socket is not None:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            made.settimeout(_CONNECT_S)
            made.connect(str(address.socket))
        except OSError:
            made.close()
            raise
        return made
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

# As the other adapters: a call, and one page of a list.
_CALL_S, _LIST_S = 2.0, 5.0


def run_sync(main: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine returns that waits for nothing but this adapter."""
    try:
        main.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    main.close()
    raise RuntimeError("it waits for an event loop; only what reads by QuickReads may be driven")


class SyncReader:
    """Reads keys of the etcd at an address, below its prefix; connects when first used. To be closed."""

    def __init__(self, address: EtcdAddress, clock: Clock) -> None:
        self._address = address
        self._clock = clock
        self._urls = [url.rstrip("/") for url in address.endpoints] or [""]
        self._connection: HttpConnection | None = None
        self._token: str | None = None
        self._has_asked = not address.username

    async def get(self, key: str) -> KeyValue | None:
        """Return the key as it is now (linearizable); None if it is not there."""
        answer = self._call("/kv/range", {"key": b64(self._address.prefix + key)}, _CALL_S)
        found = answer.get("kvs", ())
        return self._inside(key_value(found[0])) if found else None

    async def list(self, prefix: str) -> Listing:
        """Return every key that begins with `prefix`, all as of one revision."""
        found = await reads.collect(lambda: self._pages(self._address.prefix + prefix))
        items = tuple([self._inside(item) for item in found.items])
        return Listing(revision=found.revision, items=items, store=found.store)

    def close(self) -> None:
        """Let go of the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _pages(self, prefix: str) -> AsyncGenerator[Listing]:
        range_end = b64(prefix_end(prefix))

        async def fetch(*, start: str, revision: int, limit: int) -> reads.Page:
            body = {
                "key": b64(start),
                "range_end": range_end,
                "limit": limit,
                "revision": str(revision),
            }
            answer = self._call("/kv/range", body, _LIST_S)
            return reads.Page(
                items=tuple(key_value(tree) for tree in answer.get("kvs", ())),
                revision=int(field_at(answer, "header", "revision")),
                store=str(field_at(answer, "header", "cluster_id")),
                more=bool(answer.get("more")),
            )

        return reads.pages(prefix, fetch)

    def _inside(self, item: KeyValue) -> KeyValue:
        return item._replace(key=item.key.removeprefix(self._address.prefix))

    def _call(self, path: str, body: Json, limit_s: float) -> Json:
        """Return what the first member says that answers.

        Raises:
            StoreError: none did, or it refused.

        """
        for turn in range(len(self._urls)):
            try:
                return self._ask(path, body, limit_s)
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
        who = {"name": self._address.username, "password": self._address.password}
        try:
            return str(field_at(self._exchange("/auth/authenticate", who, _CALL_S), "token"))
        except AuthOffError:
            return None

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


def _parse_json(said: bytes) -> Json:
    try:
        tree = json.loads(said)
    except (ValueError, RecursionError) as error:
        raise not_etcd_error(said) from error
    if not isinstance(tree, dict):
        raise not_etcd_error(said)
    return tree
