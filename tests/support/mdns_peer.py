"""A machine of a local network, as a process: `python -m tests.support.mdns_peer ROLE NAME PORT [FLEET CA]` announces.

`flood ADDRESS` announces more than anyone may hear. With `--from INTERFACE ADDRESS/BITS` before the other words, it sends from this address alone.
"""

import asyncio
import ipaddress
import socket
import sys
from collections.abc import Iterator

from zeroconf._dns import DNSAddress, DNSPointer, DNSRecord, DNSService, DNSText
from zeroconf._protocol.outgoing import DNSOutgoing

from machinery.clock import SystemClock
from machinery.mdns import Announcer, Service
from machinery.network_interfaces import Interface, InterfaceLister
from machinery.process_main import run_until_signal
from schemas.wire.discovery import SERVICE, AnnouncedRole, Announcement, parse, render


def service(words: list[str]) -> Service:
    """Return what is announced."""
    role, name, port, *fleet = words
    announced_roles: dict[str, AnnouncedRole] = {
        "control": "control",
        "gateway": "gateway",
        "new": "new",
    }
    announcement = Announcement(
        role=announced_roles[role],
        name=name,
        fleet=fleet[0] if fleet else "",
        authorities=tuple(fleet[1:]),
    )
    properties = render(announcement)
    assert parse(properties) == announcement
    return Service(name=f"{name}-{role}", port=int(port), properties=properties)


def flood(address: str) -> Iterator[bytes]:
    """Yield packets that announce 400 services with hostile texts, from one machine."""
    own, ttl, name = ipaddress.IPv4Address(address).packed, 120, "x" * 40
    for number in range(400):
        out = DNSOutgoing(0x8400)
        server = f"flood-{number}.local."
        sign = "\x1b" if number % 4 == 0 else "\u202e"
        full = f"{sign}[2J{name}-{number:03}.{SERVICE}"
        txt = b"\x0av=\x1b[2J\x9b\xff\x07"[:11].ljust(11, b"x") + b"\xc8k=" + b"\x07" * 198
        records: list[DNSRecord] = [
            DNSPointer(SERVICE, 12, 1, ttl, full),
            DNSService(full, 33, 1, ttl, 0, 0, 4002, server),
            DNSText(full, 16, 1, ttl, txt),
            DNSAddress(server, 1, 1, ttl, own),
        ]
        for record in records:
            out.add_answer_at_time(record, 0)
        yield from out.packets()


async def main() -> None:
    """Announce for ever."""
    words = sys.argv[1:]
    if words[0] == "flood":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            interface = socket.inet_aton(words[1])
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, interface)
            for packet in flood(words[1]):
                sender.sendto(packet, ("224.0.0.251", 5353))
        return
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
