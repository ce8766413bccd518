"""HTTP/1.1 over one socket, as far as etcd's JSON gateway needs it: a POST, its answer, the next. Blocks.

`http.client` would do the same, after importing a parser of e-mail: a quarter of the time that
`fleetctl get` has.
"""

import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from machinery.clock import Clock
from store.errors import UnavailableError
from store.etcd.address import EtcdAddress

if TYPE_CHECKING:  # 20 ms, for those who speak TLS
    from ssl import SSLContext

_CONNECT_S = 1.0
_CHUNK = 2**18
_LONGEST_HEAD = 2**16


class Answer(NamedTuple):
    """An HTTP answer, whole."""

    status: int
    body: bytes
    is_last: bool
    """Whether the other side hangs up after it."""


class BrokenError(UnavailableError):
    """The connection broke, or what came over it is no HTTP."""


class Connection:
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
            self._socket = _opened(address, url, tls)
        except (OSError, ValueError) as error:
            raise BrokenError(f"etcd at {url or address}: {error}") from error

    def close(self) -> None:
        self._socket.close()

    def post(self, path: str, body: bytes, headers: dict[str, str], limit_s: float) -> Answer:
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
            return _Incoming(lambda: self._received(until)).answer()
        except (OSError, ValueError) as error:
            raise BrokenError(f"etcd at {self._host}: {error}") from error

    def _received(self, until: float) -> bytes:
        left = until - self._clock.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        self._socket.settimeout(left)
        found = self._socket.recv(_CHUNK)
        if not found:
            raise ConnectionResetError("it hung up in the middle of an answer")
        return found


class _Incoming:
    """What comes in, cut into lines and lengths."""

    def __init__(self, more: Callable[[], bytes]) -> None:
        self._more = more
        self._rest = bytearray()

    def answer(self) -> Answer:
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
            return Answer(status, self._chunks(), is_last=is_last)
        length = headers.get("content-length", "")
        if not length.isdecimal():
            raise ValueError("its answer does not say how long it is")
        return Answer(status, self._exactly(int(length)), is_last=is_last)

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


def _opened(address: EtcdAddress, url: str, tls: "SSLContext | None") -> socket.socket:
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
