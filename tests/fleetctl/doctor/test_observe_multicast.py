"""Listening for announcements that the store promises: virtual time here, a real network in tests/fleet/test_discovery.py."""

import asyncio
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field

from fleetctl.discovery.local_network import read_records
from fleetctl.discovery.suggestions import Findings
from fleetctl.doctor.local import check_announcements
from fleetctl.doctor.observe_links import LISTEN_S, listen, networks_to_hear, read_multicast
from insight.doctor.network_checks import ListenedNetwork, check_multicast
from machinery import virtual_time
from machinery.mdns import ServiceRecord
from machinery.network_interfaces import Interface
from machinery.virtual_time import VirtualClock
from schemas.records import GatewayLease
from schemas.wire.discovery import Announcement, render

HERE = frozenset({"127.0.0.1", "10.0.0.1", "10.9.0.1"})
LAN = Interface("en0", (ipaddress.IPv4Interface("10.0.0.1/24"),))
LAB = Interface("en1", (ipaddress.IPv4Interface("10.9.0.1/24"),))
NETWORK = ListenedNetwork(interface="en0", gateways=("gateway/g",))


def lease(host: str, *, is_announced: bool = True) -> GatewayLease:
    return GatewayLease(url=f"https://{host}:4000", version="1", is_announced=is_announced)


def record(address: str, interface: str = "en0") -> ServiceRecord:
    announced = Announcement(role="gateway", name="mac-2", fleet="0" * 32)
    return ServiceRecord(
        name="mac-2-gateway", port=4000, properties=render(announced), addresses=(address,),
        interface=interface, age_s=1.0,
    )  # fmt: skip


@dataclass
class Network:
    """A network on which announcements arrive at given times."""

    arrivals: dict[float, ServiceRecord] = field(default_factory=dict)
    heard: list[ServiceRecord] = field(default_factory=list)

    async def run(self) -> None:
        clock = VirtualClock()
        for at, service_record in self.arrivals.items():
            await clock.sleep(at - clock.monotonic())
            self.heard.append(service_record)
        await asyncio.Event().wait()

    def records(self) -> Sequence[ServiceRecord]:
        return self.heard


def listened(arrivals: dict[float, ServiceRecord]) -> ListenedNetwork:
    async def work() -> ListenedNetwork:
        start = VirtualClock().monotonic()
        network = Network({start + after: one for after, one in arrivals.items()})
        [found] = await listen((NETWORK,), network, HERE, VirtualClock())
        return found

    return virtual_time.run(work())


class TestExpected:
    def test_a_gateway_of_another_machine_on_a_network_of_this_one_is_to_be_heard(self) -> None:
        leases = {"g": lease("10.0.0.2"), "h": lease("10.0.0.3")}
        [network] = networks_to_hear(leases, [LAN, LAB], HERE)
        assert (network.interface, network.gateways) == ("en0", ("gateway/g", "gateway/h"))

    def test_a_gateway_that_does_not_announce_itself_here_is_not_missed(self) -> None:
        leases = {
            "off": lease("10.0.0.2", is_announced=False),
            "own": lease("10.0.0.1"),
            "loopback": lease("127.0.0.1"),
            "routed": lease("172.16.0.2"),
            "named": lease("gateway.example"),
            "v6": lease("[fd00::2]"),
        }
        assert networks_to_hear(leases, [LAN, LAB], HERE) == ()

    async def test_without_announced_gateways_nothing_is_listened_to(self) -> None:
        leases = {"off": lease("10.0.0.2", is_announced=False)}
        assert await read_multicast(leases, VirtualClock()) == ()


class TestListening:
    def test_it_ends_as_soon_as_another_machine_is_heard(self) -> None:
        network = listened({1.0: record("10.0.0.2"), 9.0: record("10.0.0.3")})
        assert network.is_heard
        assert network.listened_s < 2

    def test_it_ends_after_its_limit_when_only_this_machine_or_another_network_is_heard(
        self,
    ) -> None:
        network = listened({1.0: record("10.0.0.1"), 2.0: record("10.9.0.2", "en1")})
        assert not network.is_heard
        assert LISTEN_S <= network.listened_s < LISTEN_S + 1


class TestFinding:
    def test_silence_of_a_gateway_that_answers_is_a_warning_with_the_remedy(self) -> None:
        silent = ListenedNetwork(interface="en0", gateways=("gateway/g",), listened_s=10.0)
        [finding] = check_multicast((silent,), frozenset({"gateway/g"}))
        assert finding.level == "WARN"
        assert "gateway/g answers on en0, and nothing is heard" in finding.message
        assert "fleetctl join HOST:4002" in finding.advice
        assert "--gateway URL" in finding.advice

    def test_silence_of_a_gateway_that_does_not_answer_says_nothing(self) -> None:
        silent = ListenedNetwork(interface="en0", gateways=("gateway/g",), listened_s=10.0)
        assert list(check_multicast((silent,), frozenset())) == []

    def test_a_network_on_which_something_is_heard_is_fine(self) -> None:
        heard = ListenedNetwork(interface="en0", gateways=("gateway/g",), is_heard=True)
        [finding] = check_multicast((heard,), frozenset({"gateway/g"}))
        assert (finding.level, finding.message) == (
            "OK",
            "announcements of other machines are heard on en0",
        )


class TestBeforeJoining:
    def test_fleets_that_are_heard_are_named(self) -> None:
        announcements = check_announcements(
            Findings(suggestions=tuple(read_records([record("10.0.0.2")])))
        )
        assert (announcements.level, announcements.message) == (
            "OK",
            "1 fleet is heard: gateway at 10.0.0.2:4000",
        )

    def test_silence_is_no_failure_and_names_the_way_without_multicast(self) -> None:
        announcements = check_announcements(Findings())
        assert (announcements.level, announcements.check) == ("UNKNOWN", "announcements")
        assert "fleetctl join HOST:4002" in announcements.advice
        announcements = check_announcements(Findings(problems=("mdns: this machine is alone",)))
        assert (announcements.level, announcements.message) == (
            "UNKNOWN",
            "mdns: this machine is alone",
        )
