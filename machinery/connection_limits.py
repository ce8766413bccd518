"""Limits of the connections of a listener, by the address of the client."""

import ipaddress
from collections import Counter
from collections.abc import Callable
from functools import lru_cache

# What one household or virtual machine gets: an attacker has all its addresses.
_IPV6_PREFIX = 64


@lru_cache(maxsize=1024)  # each new connection asks
def is_loopback(address: str) -> bool:
    """Return whether only this machine can connect to an IP address, or can have it as its own."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def client_network(host: str) -> str:
    """Return the address by which a client is counted: IPv4 as it is, IPv6 by /64; "local" for a unix socket."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return "local"
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    host_bits = 128 - _IPV6_PREFIX
    network = ipaddress.IPv6Address(int(address) >> host_bits << host_bits)
    return f"{network}/{_IPV6_PREFIX}"


class AddressLimit:
    """Number of connections of each client address, of IPv6 of each /64: one client must not take all of them."""

    def __init__(
        self,
        limit: int,
        *,
        is_local_free: bool = True,
        on_refuse: Callable[[], object] = lambda: None,
    ) -> None:
        """Set the limit of each address.

        Args:
            limit: Connections of one address; 0: no limit.
            is_local_free: This machine's own connections are not counted: proxies and other processes of the fleet run there.
            on_refuse: Called for each connection that is one too many.

        """
        self.limit = limit
        self._is_local_free = is_local_free
        self._on_refuse = on_refuse
        self._open: Counter[str] = Counter()

    def enter(self, host: str) -> str | None:
        """Count a connection; return what to give `leave` at its end, or None for one too many."""
        if not self.limit or not host or (self._is_local_free and is_loopback(host)):
            return ""
        address = client_network(host)
        if self._open[address] >= self.limit:
            self._on_refuse()
            return None
        self._open[address] += 1
        return address

    def leave(self, address: str) -> None:
        """Count a connection no more."""
        if not address:
            return
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]
