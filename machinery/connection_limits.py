"""Limits of the connections of a listener: by the address of the client, and of all together."""

import heapq
import ipaddress
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Final, Literal, Protocol, TypeAlias

# What one household or virtual machine gets: an attacker has all its addresses.
_IPV6_PREFIX = 64
# The part of the connections that is closed at once, so that the next new connections need no search.
_CLOSED_AT_ONCE: Final = 16

AdmissionRefusal: TypeAlias = Literal["address", "full"]
"""address: the client's address has as many connections as one may have. full: every other connection has a request."""


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


class LimitedConnection(Protocol):
    """A connection that may be closed to make room for another."""

    @property
    def is_serving(self) -> bool:
        """True while a request is answered."""
        ...

    @property
    def shed_order(self) -> tuple[bool, bool, float]:
        """The least is closed first, such as (it has a verified peer, a request arrives, time)."""
        ...

    def shed(self) -> None:
        """Close the connection at once."""
        ...


class ConnectionLimiter:
    """Admits the connections of one listener.

    When there is no room for another, connections without a request are closed, in the order of `shed_order`. A new one
    is refused only if all others have a request, so idle connections keep none out.
    """

    def __init__(
        self,
        addresses: AddressLimit,
        has_room: Callable[[int], bool],
        on_shed: Callable[[Literal["idle", "refused"]], object] = lambda _: None,
    ) -> None:
        """Set the limits.

        Args:
            addresses: The limit of each address.
            has_room: Returns whether there may be so many connections.
            on_shed: Called for each connection that is closed (idle) or refused to make or keep room.

        """
        self.addresses = addresses
        self._has_room = has_room
        self._on_shed = on_shed
        self._connections: dict[LimitedConnection, str] = {}
        """With the address under which each is counted."""

    def admit(self, connection: LimitedConnection, host: str) -> AdmissionRefusal | None:
        """Count a new connection until `leave`; return why it must be closed, or None. `host`: empty for any."""
        address = self.addresses.enter(host)
        self._connections[connection] = address or ""
        if address is None:
            return "address"
        if self._has_room(len(self._connections)) or self.make_room(connection):
            return None
        self._on_shed("refused")
        return "full"

    def make_room(self, newcomer: LimitedConnection | None = None) -> bool:
        """Close connections without a request, but not the newcomer; return False if there is none."""
        idle = [
            limited_connection
            for limited_connection in self._connections
            if limited_connection is not newcomer and not limited_connection.is_serving
        ]
        count = max(1, len(self._connections) // _CLOSED_AT_ONCE)
        for connection in heapq.nsmallest(count, idle, key=lambda idle_one: idle_one.shed_order):
            connection.shed()
            self._on_shed("idle")
        return bool(idle)

    def leave(self, connection: LimitedConnection) -> None:
        """Count a connection no more."""
        self.addresses.leave(self._connections.pop(connection, ""))
