"""Services of the local network, with real zeroconf: in network namespaces on one bridge, and in virtual time."""

import asyncio
import errno
import ipaddress
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from typing_extensions import override

from machinery import mdns, processes, virtual_time
from machinery.clock import SystemClock
from machinery.mdns import (
    BACKOFF,
    LIST_EVERY_S,
    MAX_RECORDS,
    Announcer,
    Browser,
    LinkError,
    Service,
    ServiceRecord,
)
from machinery.network_interfaces import Interface
from machinery.virtual_time import VirtualClock
from schemas.wire.discovery import SERVICE
from tests.support import netns
from tests.support.netns import Networks
from tests.support.waiting import until

FLEET, CA = "0" * 32, "a" * 64
networked = [
    pytest.mark.full,
    pytest.mark.skipif(not netns.available(), reason="needs network namespaces"),
]


@dataclass
class Lan:
    """Machines on one bridge, of which the test is one."""

    networks: Networks
    folder: Path
    browser: Browser
    children: dict[str, processes.ChildProcess]

    def start(
        self, member: int, role: str, name: str, *fleet: str, source: tuple[str, ...] = ()
    ) -> None:
        command = (*self.networks.place(member).prefix, sys.executable, "-m")
        words = ("tests.support.mdns_peer", *source, role, name, "4002", *fleet)
        log = self.folder / f"{name}.log"
        self.children[f"{name}@{member}"] = processes.spawn((*command, *words), log=log)

    async def flood(self, member: int) -> None:
        place = self.networks.place(member)
        words = (sys.executable, "-m", "tests.support.mdns_peer", "flood", place.client_host)
        process = await asyncio.create_subprocess_exec(*place.prefix, *words)
        async with asyncio.timeout(30):
            assert await process.wait() == 0

    def add_address(self, member: int, address: str) -> None:
        command = (*self.networks.place(member).prefix, "ip", "addr", "add", address, "dev", "c0")
        subprocess.run(command, check=True, timeout=10)

    def names(self) -> list[str]:
        return [record.name for record in self.browser.records()]

    async def hears(self, *names: str, limit_s: float) -> list[ServiceRecord]:
        await until(lambda: set(names) <= set(self.names()), limit_s=limit_s, what=f"{names} heard")
        return self.browser.records()

    async def hears_again(self, since: float, *, limit_s: float) -> None:
        """Wait for an announcement after a moment of the loop's time."""

        def is_new(record: ServiceRecord) -> bool:
            return record.age_s < asyncio.get_running_loop().time() - since

        await until(
            lambda: any(map(is_new, self.browser.records())),
            limit_s=limit_s,
            what="an announcement after the flap",
        )

    def signal(self, name: str, number: signal.Signals) -> None:
        self.children[f"{name}@0"].send(number)


def on_bridge(networks: Networks) -> Interface:
    """Return the test's own leg."""
    place = networks.place(0)
    own = ipaddress.IPv4Interface(f"{place.client_host}/24").network
    return Interface("bridge", (ipaddress.IPv4Interface(f"{own.network_address + 1}/24"),))


@asynccontextmanager
async def lan(folder: Path) -> AsyncIterator[Lan]:
    with Networks(2).made() as networks:

        async def interfaces() -> list[Interface]:
            return [on_bridge(networks)]

        browser = Browser(SERVICE, SystemClock(), interfaces)
        children: dict[str, processes.ChildProcess] = {}
        async with asyncio.TaskGroup() as group:
            task = group.create_task(browser.run())
            try:
                yield Lan(networks, folder, browser, children)
            finally:
                for child in children.values():
                    await processes.end(child, SystemClock(), grace_s=5.0)
                task.cancel()


class TestOnOneBridge:
    pytestmark = networked

    async def test_a_machine_is_heard_within_five_seconds_and_says_goodbye(
        self, tmp_path: Path
    ) -> None:
        async with lan(tmp_path) as net:
            await net.hears(limit_s=5)
            begun = asyncio.get_running_loop().time()
            net.start(0, "new", "mac-9")
            [record] = await net.hears("mac-9-new", limit_s=5)
            print(f"heard after {asyncio.get_running_loop().time() - begun:.1f} s")
            assert record.addresses == (net.networks.place(0).client_host,)
            assert record.properties == {"v": "1", "role": "new", "name": "mac-9"}
            assert record.age_s < 5
            net.signal("mac-9", signal.SIGTERM)
            await until(lambda: not net.names(), limit_s=10, what="the goodbye")

    async def test_two_processes_of_one_name_are_both_heard(self, tmp_path: Path) -> None:
        async with lan(tmp_path) as net:
            net.start(0, "control", "mac-1", FLEET, CA)
            await net.hears("mac-1-control", limit_s=10)
            net.start(1, "control", "mac-1", FLEET, CA)
            both = await net.hears("mac-1-control", "mac-1-control-2", limit_s=15)
            assert {record.addresses[0] for record in both} == {
                net.networks.place(member).client_host for member in (0, 1)
            }

    async def test_a_machine_that_is_killed_leaves_a_hint_that_grows_old(
        self, tmp_path: Path
    ) -> None:
        async with lan(tmp_path) as net:
            net.start(0, "control", "mac-1", FLEET, CA)
            await net.hears("mac-1-control", limit_s=10)
            net.signal("mac-1", signal.SIGKILL)
            await until(
                lambda: [record for record in net.browser.records() if record.age_s > 5],
                limit_s=20,
                what="a hint that is older than the repeated announcements",
            )

    @pytest.mark.timeout(240)
    async def test_a_machine_is_announced_again_after_each_flap_of_its_link(
        self, tmp_path: Path
    ) -> None:
        async with lan(tmp_path) as net:
            net.start(0, "control", "mac-1", FLEET, CA)
            await net.hears("mac-1-control", limit_s=10)
            for _ in range(3):
                net.networks.cut_clients(0)
                await asyncio.sleep(0.5)
                net.networks.mend_clients(0)
                begun = asyncio.get_running_loop().time()
                await net.hears_again(begun, limit_s=15)
                print(f"again after {asyncio.get_running_loop().time() - begun:.1f} s")

    async def test_what_is_heard_is_bounded_and_made_printable(self, tmp_path: Path) -> None:
        async with lan(tmp_path) as net:
            net.start(1, "new", "mac-9")
            await net.hears("mac-9-new", limit_s=10)
            await net.flood(0)
            records = await until(
                lambda: found if len(found := net.browser.records()) > 100 else None,
                limit_s=20,
                what="the flood heard",
            )
            assert len(records) <= MAX_RECORDS
            hostile = [record for record in records if record.name != "mac-9-new"]
            texts = [service_record.name for service_record in hostile]
            for service_record in hostile:
                texts += [*service_record.properties, *service_record.properties.values()]
            assert all(text.isprintable() and len(text) <= 255 for text in texts)
            assert any("2J" in text for text in texts)
            assert "mac-9-new" in net.names()

    async def test_a_refusal_to_send_ends_the_session_of_that_link(self, tmp_path: Path) -> None:
        async with (
            lan(tmp_path) as net,
            mdns._open(on_bridge(net.networks), SystemClock()) as link,
        ):
            for reader in link.responder.zeroconf.engine.readers:
                protocol = reader.transport.get_protocol()
                assert isinstance(protocol, asyncio.DatagramProtocol)
                protocol.error_received(OSError(errno.EHOSTUNREACH, "No route to host"))
            with pytest.raises(LinkError, match=r"bridge: .* No route to host"):
                await link.hold()

    async def test_answers_from_elsewhere_than_the_link_are_dropped(self, tmp_path: Path) -> None:
        async with lan(tmp_path) as net:
            elsewhere = "203.0.113.9/24"  # for documentation, RFC 5737
            net.add_address(0, elsewhere)
            both = on_bridge(net.networks)
            both = Interface(
                both.name, (*both.addresses, ipaddress.IPv4Interface("203.0.113.1/24"))
            )

            async def interfaces() -> list[Interface]:
                return [both]

            lenient = Browser(SERVICE, SystemClock(), interfaces)
            async with asyncio.TaskGroup() as group:
                task = group.create_task(lenient.run())
                net.start(0, "control", "far", FLEET, CA, source=("--from", "c0", elsewhere))
                net.start(1, "control", "near", FLEET, CA)
                await until(lambda: len(lenient.records()) == 2, limit_s=15, what="both heard")
                await net.hears("near-control", limit_s=10)
                assert net.names() == ["near-control"]
                task.cancel()


class RecordingClock(VirtualClock):
    """A virtual clock that remembers how long was slept."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    @override
    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await super().sleep(seconds)


def test_an_interface_that_fails_is_tried_again_for_ever_with_longer_waits() -> None:
    # No machine has this address (RFC 5737), so nothing can be sent from it.
    away = Interface("en9", (ipaddress.IPv4Interface("192.0.2.77/32"),))

    async def work() -> list[float]:
        clock = RecordingClock()

        async def interfaces() -> list[Interface]:
            return [away]

        service = Service(name="mac", port=1, properties={})
        async with asyncio.TaskGroup() as group:
            task = group.create_task(Announcer(SERVICE, lambda: service, clock, interfaces).run())
            await asyncio.sleep(3600)
            task.cancel()
        return [one for one in clock.slept if one != LIST_EVERY_S]

    waits = virtual_time.run(work())
    assert len(waits) > 50
    assert waits[0] <= BACKOFF.first_s
    assert all(0 < wait <= BACKOFF.limit_s for wait in waits)
    assert all(wait >= BACKOFF.limit_s / 2 for wait in waits[10:])
