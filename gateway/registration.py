"""The address at which the reconciler reaches this gateway, for its registration in the store."""

import contextlib
import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from machinery.http_server import ListenAddress

_LOCAL = "127.0.0.1"


def parse_address(text: str) -> ListenAddress | None:
    """Return host and port of HOST[:PORT], port 0 if it is missing; None for an empty text.

    Raises:
        ValueError: the text has another form.

    """
    if not text:
        return None
    wrong = f"{text} is no address; write HOST or HOST:PORT, such as 10.0.0.5:4000 or [fd00::5]"
    # A text with more than one colon is IPv6, which needs brackets.
    parts = urlsplit(f"//{text}") if text.count(":") < 2 or text.startswith("[") else None
    if parts is None or not parts.hostname or parts.netloc != text or "@" in text:
        raise ValueError(wrong)
    try:
        return ListenAddress(parts.hostname, parts.port or 0)
    except ValueError:
        raise ValueError(wrong) from None


def advertised_url(
    advertised: ListenAddress | None,
    bound: ListenAddress,
    etcd: Sequence[str],
    *,
    is_tls: bool = False,
) -> str:
    """Return the base URL at which the reconciler reaches this gateway.

    The configured address wins, then the bound one. If the gateway listens on every address, the
    local address of the route to etcd is used, because the reconciler reaches etcd too.
    """
    host, port = advertised or bound
    if advertised is None and is_any(host):
        host = next(filter(None, map(_leads_to, etcd)), _LOCAL)
    named = f"[{host}]" if ":" in host else host
    return f"{'https' if is_tls else 'http'}://{named}:{port or bound.port}"


def is_any(host: str) -> bool:
    """Return whether a gateway that listens on the host listens on every address of its machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return not host


def _leads_to(endpoint: str) -> str:
    """Return the local address of the route to the endpoint; empty if there is no route."""
    parts = urlsplit(endpoint)
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)
        family, type_, protocol, _, address = found[0]
        # Connecting a datagram socket only asks the kernel for the route.
        with socket.socket(family, type_, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return ""
