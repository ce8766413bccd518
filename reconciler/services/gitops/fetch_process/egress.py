"""Limits where the fetch process connects to, for sources that come out of Git: only to public addresses.

A committer chooses the repository of such a source. Without the limit, it could make the reconciler's machine send
requests to services that only this machine and its network reach.
"""

import ipaddress
import socket
import sys
from typing import Any
from urllib.parse import urlsplit

import urllib3

from reconciler.services.gitops.fetch_process.errors import FetchError


def restrict(trusted_host: str, manager: urllib3.PoolManager | None) -> None:
    """Let this process connect to public addresses only, and to those of a trusted host, for the rest of its life.

    The check is made of the address of each connection: names that resolve to another one, and redirects, gain nothing.
    Through a proxy only names are left to check; `manager` sends the requests of https, None for ssh.
    """
    trusted = _addresses(trusted_host)
    if manager is not None:
        trusted |= _addresses((manager.proxy and manager.proxy.host) or "")
        _check_urls(manager, trusted_host)

    def check(event: str, arguments: tuple[object, ...]) -> None:
        if event != "socket.connect":
            return
        address = arguments[1]
        host = str(address[0]) if isinstance(address, tuple) else str(address)
        if host not in trusted and not is_public(host):
            raise _refusal(host)

    sys.addaudithook(check)


def _check_urls(manager: urllib3.PoolManager, trusted_host: str) -> None:
    """Check the address of each request, and of each redirect, before it is sent."""
    send = manager.urlopen

    def checked(method: str, url: str, *others: Any, **more: Any) -> Any:
        parts = urlsplit(url)
        host = (parts.hostname or "").lower()
        if parts.scheme != "https":
            raise _refusal(f"{parts.scheme}://{host}")
        if host != trusted_host and not all(map(is_public, _addresses(host) or {host})):
            raise _refusal(host)
        return send(method, url, *others, **more)

    manager.urlopen = checked  # type: ignore[method-assign] # redirects call it again


def _refusal(host: str) -> FetchError:
    """Return the error about an address that the source may not name."""
    return FetchError(
        "RepositoryRefused",
        f"{host} is not a public address of https or ssh, and this source comes out of a repository: whoever commits there could reach "
        "every service of the reconciler's network. Apply the GitSource by hand (fleetctl apply -f), or use the host of "
        "the repository that it comes from",
    )


def is_public(host: str) -> bool:
    """Return whether a numeric address is one of the internet, also behind every form that carries an IPv4 address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            address = ipaddress.IPv4Address(address.packed[-4:])
        else:
            inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None,))[-1]
            address = inner or address
    return address.is_global and not address.is_multicast


_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def _addresses(host: str) -> set[str]:
    """Return the addresses of a host; none if it has none."""
    if not host:
        return set()
    try:
        return {str(one[4][0]) for one in socket.getaddrinfo(host, None)}
    except OSError:
        return set()
