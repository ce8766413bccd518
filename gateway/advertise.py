"""By which address the reconciler reaches this gateway. Sends nothing."""

import contextlib
import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from gateway.routing.table import Origin

_LOCAL = "127.0.0.1"


def parse(text: str) -> Origin | None:
    """Return host and port (0 if it is left out) of HOST[:PORT]; None for an empty text.

    Raises:
        ValueError: it is something else.

    """
    if not text:
        return None
    wrong = f"{text} is no address; write HOST or HOST:PORT, such as 10.0.0.5:4000 or [fd00::5]"
    # With more than one colon it is IPv6, which needs its brackets.
    parts = urlsplit(f"//{text}") if text.count(":") < 2 or text.startswith("[") else None
    if parts is None or not parts.hostname or parts.netloc != text or "@" in text:
        raise ValueError(wrong)
    try:
        return Origin(parts.hostname, parts.port or 0)
    except ValueError:
        raise ValueError(wrong) from None


def url(advertised: Origin | None, bound: Origin, etcd: Sequence[str]) -> str:
    """Return the gateway's base address: what its owner says, else what it listens on.

    Who listens on every address has none to tell; then it is the one that leads to etcd, which the
    reconciler reaches as well.
    """
    host, port = advertised or bound
    if advertised is None and _is_any(host):
        host = next(filter(None, map(_leads_to, etcd)), _LOCAL)
    named = f"[{host}]" if ":" in host else host
    return f"http://{named}:{port or bound.port}"


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return not host


def _leads_to(endpoint: str) -> str:
    """Return the address of ours that packets to etcd would come from; empty if there is no way."""
    parts = urlsplit(endpoint)
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)
        family, type_, protocol, _, address = found[0]
        # Connecting a datagram socket only asks the kernel for the route.
        with socket.socket(family, type_, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return ""
