"""Announcements on the networks of this machine: whether those of other machines, which the store knows of, arrive."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol
from urllib.parse import urlsplit

from fleetctl.doctor.observe_links import local_addresses
from insight.doctor.network_checks import ListenedNetwork
from machinery.clock import Clock
from machinery.network_interfaces import Interface, InterfaceLister
from schemas.records import GatewayLease
from schemas.wire.discovery import SERVICE

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
