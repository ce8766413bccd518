"""A machine of a local network, as a process: `python -m tests.support.mdns_peer ROLE NAME PORT [FLEET CA]` announces.

With `--from INTERFACE ADDRESS/BITS` before the other words, it sends from this address alone.
"""

import asyncio
import ipaddress
import sys

from machinery.clock import SystemClock
from machinery.mdns import Announcer, Service
from machinery.network_interfaces import Interface, InterfaceLister
from machinery.process_main import run_until_signal
from schemas.wire.discovery import SERVICE, AnnouncedRole, Announcement, parse, render


def service(words: list[str]) -> Service:
    """Return what is announced."""
    role, name, port, *fleet = words
    found: dict[str, AnnouncedRole] = {"control": "control", "gateway": "gateway", "new": "new"}
    announcement = Announcement(
        role=found[role],
        name=name,
        fleet=fleet[0] if fleet else "",
        authorities=tuple(fleet[1:]),
    )
    properties = render(announcement)
    assert parse(properties) == announcement
    return Service(name=f"{name}-{role}", port=int(port), properties=properties)


async def main() -> None:
    """Announce for ever."""
    words = sys.argv[1:]
    own: list[Interface] = []
    if words[0] == "--from":
        own = [Interface(words[1], (ipaddress.IPv4Interface(words[2]),))]
        words = words[3:]
    what = service(words)

    async def interfaces() -> list[Interface]:
        return own or await InterfaceLister()()

    async with asyncio.TaskGroup() as group:
        group.create_task(Announcer(SERVICE, lambda: what, SystemClock(), interfaces).run())


if __name__ == "__main__":
    sys.exit(run_until_signal(main))
