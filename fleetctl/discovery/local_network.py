"""Announcements on the local network (mDNS), as suggestions. Every machine of that network can forge them."""

import asyncio
import contextlib
from collections.abc import Iterable, Iterator

from fleetctl.discovery.suggestions import Findings, SourceName, Suggestion
from fleetctl.fleets.join_client import JoinAddress
from machinery.clock import Clock
from machinery.mdns import Browser, ListInterfaces, ServiceRecord
from machinery.network_interfaces import InterfaceLister
from schemas.wire.discovery import SERVICE, parse


def read_records(records: Iterable[ServiceRecord]) -> Iterator[Suggestion]:
    """Yield the suggestions in records; others are ignored. Pure."""
    for record in records:
        announcement = parse(record.properties)
        if announcement is None or not 0 < record.port < 65536:
            continue
        for address in record.addresses:
            yield Suggestion(
                source="mdns",
                role=announcement.role,
                name=announcement.name,
                address=JoinAddress(address, record.port),
                fleet=announcement.fleet,
                authorities=announcement.authorities,
                is_tls=announcement.is_tls,
                age_s=record.age_s,
            )


class LocalNetwork:
    """The source that listens on the local network for a moment."""

    def __init__(
        self, clock: Clock, listen_s: float, interfaces: ListInterfaces | None = None
    ) -> None:
        self._clock = clock
        self._listen_s = listen_s
        self._interfaces = interfaces or InterfaceLister()

    @property
    def name(self) -> SourceName:
        """The name of the source."""
        return "mdns"

    async def suggest(self) -> Findings:
        """Listen, and return what answered."""
        try:
            is_alone = not await self._interfaces()
        except OSError as error:
            return Findings(problems=(f"mdns: the network interfaces cannot be listed: {error}",))
        if is_alone:
            problem = (
                "mdns: this machine has no network interface with multicast and an IPv4 address"
            )
            return Findings(problems=(problem,))
        browser = Browser(SERVICE, self._clock, self._interfaces)
        async with asyncio.TaskGroup() as group:
            listening = group.create_task(browser.run(), name="mdns")
            try:
                await self._clock.sleep(self._listen_s)
                records = tuple(read_records(browser.records()))
            finally:
                listening.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await listening
        return Findings(suggestions=records)
