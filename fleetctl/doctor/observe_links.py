"""Observation of the networks of this machine: connections over its cables, and announcements of other machines.

The route table may send packets to another Mac over another network: only a source bound to the address of the cable
shows what the cable does.
"""

import asyncio
import contextlib
import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product
from typing import Final, Protocol
from urllib.parse import urlsplit

import psutil

from insight.doctor.cable_checks import LinkProbe
from insight.doctor.network_checks import ListenedNetwork
from machinery.clock import Clock
from machinery.network_interfaces import Interface, InterfaceLister
from nodeagent.doctor.readers import CONNECT_S, try_connect
from reconciler.groups.fabric import FabricFault, cables_between
from schemas.node import Node
from schemas.records import GatewayLease
from schemas.wire.discovery import SERVICE

_MAX_LINKS: Final = 64
_AGENT_PORT: Final = 4001
# The other Mac has answered that nothing listens at this address: the cable works.
_REACHED: Final = (errno.ECONNREFUSED, errno.ECONNRESET)


def local_addresses() -> frozenset[str]:
    """Return the addresses of this machine. Raises OSError."""
    return frozenset(
        snicaddr.address for addr in psutil.net_if_addrs().values() for snicaddr in addr
    )


def links_from(nodes: Sequence[Node], here: frozenset[str]) -> Iterator[LinkProbe]:
    """Yield the connections to try: those of nodes that are this machine, over cables with addresses at both ends."""
    reported = [(node.name, node.status) for node in nodes if node.status is not None]
    ours = [(name, status) for name, status in reported if status.address in here]
    for own, other in product(ours, reported):
        cables = () if other[0] == own[0] else cables_between(own, other, {})
        for cable in () if isinstance(cables, FabricFault) else cables:
            for source, target in zip(cable.here.addresses, cable.there.addresses, strict=False):
                if source in here:
                    yield LinkProbe(
                        node=own[0],
                        other=other[0],
                        interface=cable.here.interface,
                        source=source,
                        target=target,
                        port=urlsplit(other[1].agent_url).port or _AGENT_PORT,
                    )


async def probe_links(links: Iterable[LinkProbe]) -> tuple[LinkProbe, ...]:
    """Return the links with the error of each; they are tried at the same time."""

    async def probe(link: LinkProbe) -> LinkProbe:
        error = await try_connect(link.target, link.port, source=link.source)
        if error is None or error.errno in _REACHED:
            return link
        if isinstance(error, TimeoutError):
            reason = f"no answer within {CONNECT_S:.0f} s (errno {errno.ETIMEDOUT})"
        else:
            reason = os.strerror(error.errno).lower() if error.errno else str(error)
            reason += f" (errno {error.errno})"
        return replace(link, error=reason)

    return tuple(await asyncio.gather(*map(probe, islice(links, _MAX_LINKS))))


async def read_links(nodes: Sequence[Node]) -> tuple[LinkProbe, ...]:
    """Return the links of this machine, probed; none where it is no Mac of the fleet with cables."""
    try:
        return await probe_links(links_from(nodes, local_addresses()))
    except OSError:
        return ()


LISTEN_S: Final = 10.0
"""The longest time that is listened. Questions are asked after 0.1 s, 1 s, 3 s and 7 s."""
_LOOK_S: Final = 0.1


class Heard(Protocol):
    """A service that was heard."""

    @property
    def interface(self) -> str: ...

    @property
    def addresses(self) -> tuple[str, ...]: ...


class RecordSource(Protocol):
    """A `machinery.mdns.Browser`."""

    async def run(self) -> None: ...

    def records(self) -> Sequence[Heard]: ...


def networks_to_hear(
    leases: Mapping[str, GatewayLease], interfaces: Sequence[Interface], here: frozenset[str]
) -> tuple[ListenedNetwork, ...]:
    """Return the networks on which gateways of other machines announce themselves. Pure.

    `here` are the addresses of this machine, which hears its own processes on every network.
    """
    hosts = {
        f"gateway/{id_}": urlsplit(lease.url).hostname or ""
        for id_, lease in leases.items()
        if lease.is_announced
    }
    by_interface = {
        interface.name: tuple(
            name
            for name, host in hosts.items()
            if host not in here and interface.has_neighbour(host)
        )
        for interface in interfaces
    }
    return tuple(
        ListenedNetwork(interface=name, gateways=names)
        for name, names in by_interface.items()
        if names
    )


async def listen(
    networks: Sequence[ListenedNetwork], browser: RecordSource, here: frozenset[str], clock: Clock
) -> tuple[ListenedNetwork, ...]:
    """Return the networks with what was heard, as soon as each has carried an announcement, or the time is over."""
    begun, heard = clock.monotonic(), frozenset[str]()
    async with asyncio.TaskGroup() as group:
        listening = group.create_task(browser.run(), name="mdns")
        try:
            while clock.monotonic() - begun < LISTEN_S:
                heard = frozenset(
                    record.interface
                    for record in browser.records()
                    if not here >= set(record.addresses)
                )
                if heard.issuperset(network.interface for network in networks):
                    break
                await clock.sleep(_LOOK_S)
        finally:
            listening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await listening
    return tuple(
        replace(
            network,
            listened_s=clock.monotonic() - begun,
            is_heard=network.interface in heard,
        )
        for network in networks
    )


async def read_multicast(
    leases: Mapping[str, GatewayLease], clock: Clock
) -> tuple[ListenedNetwork, ...]:
    """Listen where gateways of other machines announce themselves; at once () where none does."""
    if not any(lease.is_announced for lease in leases.values()):
        return ()
    interfaces = InterfaceLister()
    try:
        here = local_addresses()
        networks = networks_to_hear(leases, await interfaces(), here)
    except OSError:
        return ()
    if not networks:
        return ()
    from machinery.mdns import Browser  # noqa: PLC0415 - zeroconf takes 170 ms

    return await listen(networks, Browser(SERVICE, clock, interfaces), here, clock)
