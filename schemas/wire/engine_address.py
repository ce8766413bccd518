"""Address of an engine, as `Endpoint.spec.url` has it: a TCP port, or a Unix socket on the node's own machine.

    address = EngineAddress.parse("unix:/Users/a/fleet/sock/node-1/4100.sock")
    transport, protocol = await address.connect(loop, make_protocol)

    address = EngineAddress.parse("https://10.0.0.5:4100", node="mac-1")
    transport, protocol = await address.connect(loop, make_protocol, context, "mac-1.node.mlx-fleet.internal")

The value is the key under which a gateway counts connections, load and failures.
"""

import contextlib
import os.path
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Self, TypeVar
from urllib.parse import urlsplit

if TYPE_CHECKING:  # `fleetctl get` does not wait for it
    import asyncio
    import ssl

    _P = TypeVar("_P", bound=asyncio.BaseProtocol)

_UNIX: Final = "unix:"
_FORMS: Final = "https://HOST:PORT, http://HOST:PORT or unix:/PATH"
_PORTS: Final = {"http": 80, "https": 443}
MAX_SOCKET_BYTES: Final = 103
"""The longest path of a socket: sun_path of macOS holds 104 bytes with the zero at its end; Linux has 108."""
SYSTEM_AUTHORITIES: Final = "system"
"""The certificates that the machine trusts."""
# Far beyond a host name's 253 characters.
_MAX_URL = 1024


class EngineAddress(NamedTuple):
    """Address of one engine."""

    host: str
    """Name or IP address; empty for a socket."""
    port: int
    """0 for a socket."""
    socket: str = ""
    """Absolute path of a Unix socket, valid on the engine's machine only; empty for TCP."""
    node: str = ""
    """The node whose identity the engine proves over TLS; empty for plain HTTP.

    A part of the key: a connection to one node never carries the requests for another."""
    external: str = ""
    """ROUTE/NAME of a server that the fleet did not start; empty for engines. A part of the key: two routes to a server
    have loads and health of their own."""
    authorities: str = ""
    """The certificates in PEM form that an external server's certificate leads to, or `SYSTEM_AUTHORITIES`; empty
    without TLS."""

    @classmethod
    def at_socket(cls, path: Path) -> Self:
        """Return the address of a socket.

        Raises:
            ValueError: no socket can have this path.

        """
        return cls("", 0, _checked_path(str(path)))

    @classmethod
    def parse(cls, url: str, *, node: str = "") -> Self:
        """Return the address in the URL of an endpoint of the node.

        Raises:
            ValueError: the URL has another form; the message says which is expected.

        """
        if url.startswith(_UNIX):
            return cls("", 0, _checked_path(url.removeprefix(_UNIX)))
        # The port may be beyond 65535, or brackets may not match.
        with contextlib.suppress(ValueError):
            parts = urlsplit(url[:_MAX_URL])
            is_plain = not (parts.path.strip("/") or parts.query or parts.fragment or "@" in url)
            is_known = parts.scheme == "http" or (parts.scheme == "https" and node)
            if is_known and parts.hostname and is_plain and len(url) <= _MAX_URL:
                port = parts.port or _PORTS[parts.scheme]
                return cls(parts.hostname, port, "", node if parts.scheme == "https" else "")
        raise ValueError(f"{url[:100]!r} is not {_FORMS}")

    @property
    def url(self) -> str:
        """The address as `parse` reads it."""
        return f"{_UNIX}{self.socket}" if self.socket else self.http_url

    @property
    def http_url(self) -> str:
        """The base of HTTP requests on a connection to the engine."""
        return f"{'https' if self.node or self.authorities else 'http'}://{self.authority}"

    @property
    def authority(self) -> str:
        """The value of the `Host` header."""
        if self.socket:
            return "localhost"
        if self.external and self.port == _PORTS["https" if self.authorities else "http"]:
            return f"[{self.host}]" if ":" in self.host else self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    async def connect(
        self,
        loop: "asyncio.AbstractEventLoop",
        make_protocol: "Callable[[], _P]",
        context: "ssl.SSLContext | None" = None,
        server_name: str | None = None,
    ) -> "tuple[asyncio.Transport, _P]":
        """Open a connection to the engine; over TLS with a context, to a server of this name.

        Raises:
            OSError: nothing listens there, or the handshake failed.

        """
        if self.socket:
            return await loop.create_unix_connection(make_protocol, self.socket)
        return await loop.create_connection(
            make_protocol, self.host, self.port, ssl=context, server_hostname=server_name
        )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the host; a name other than localhost counts as reachable."""
    import ipaddress  # noqa: PLC0415 - `fleetctl get` does not wait for it

    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def _checked_path(path: str) -> str:
    """Return the path of a socket if it can be one.

    Raises:
        ValueError: it is relative, has parts such as `..`, or is too long.

    """
    if len(os.fsencode(path)) > MAX_SOCKET_BYTES:
        raise ValueError(
            f"the socket's path {path[:40]!r}... has more than {MAX_SOCKET_BYTES} bytes, the limit of macOS"
        )
    is_normal = path.startswith(os.sep) and os.path.normpath(path) == path and path.isprintable()
    if not is_normal or path == os.sep:
        raise ValueError(
            f"unix:{path!r} is not {_FORMS}: the path must be absolute, without . and .."
        )
    return path
