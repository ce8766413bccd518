"""The choice of network interfaces for local services."""

from ipaddress import IPv4Interface

import pytest

from machinery.network_interfaces import (
    Interface,
    InterfaceState,
    choose,
    parse_hardware_ports,
    read_states,
    thunderbolt_devices,
)

UP = frozenset({"up", "running", "broadcast", "multicast"})
PORTS = """\

Hardware Port: Ethernet
Device: en0
Ethernet Address: a8:8f:d9:00:00:01

Hardware Port: Thunderbolt 1
Device: en2
Ethernet Address: 36:60:0f:00:00:01

Hardware Port: Thunderbolt 2
Device: en3
Ethernet Address: 36:60:0f:00:00:02

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 36:60:0f:00:00:01

Hardware Port: Thunderbolt Ethernet Slot 1
Device: en7
Ethernet Address: 36:60:0f:00:00:07

Hardware Port: Wi-Fi
Device: en1
Ethernet Address: a8:8f:d9:00:00:02
"""


def state(name: str, address: str = "10.0.0.5/24", flags: frozenset[str] = UP) -> InterfaceState:
    addresses = (IPv4Interface(address),) if address else ()
    return InterfaceState(name=name, flags=flags, addresses=addresses)


@pytest.mark.parametrize(("given", "is_chosen"), [
    pytest.param(state("en0"), True, id="ethernet"),
    pytest.param(state("eth0"), True, id="linux"),
    pytest.param(state("br0"), True, id="a-bridge-of-linux"),
    pytest.param(state("en7"), True, id="ethernet-in-a-thunderbolt-dock"),
    pytest.param(state("en2"), False, id="thunderbolt-port"),
    pytest.param(state("bridge0"), False, id="thunderbolt-bridge"),
    pytest.param(state("utun4"), False, id="tunnel"),
    pytest.param(state("awdl0"), False, id="airdrop"),
    pytest.param(state("llw0"), False, id="low-latency-wifi"),
    pytest.param(state("lo0", "127.0.0.1/8", UP | {"loopback"}), False, id="loopback"),
    pytest.param(state("wg0", flags=UP | {"pointopoint"}), False, id="point-to-point"),
    pytest.param(state("tailscale0", "100.101.1.2/32"), False, id="overlay"),
    pytest.param(state("en0", flags=UP - {"running"}), False, id="no-cable"),
    pytest.param(state("en0", flags=UP - {"multicast"}), False, id="no-multicast"),
    pytest.param(state("en0", ""), False, id="no-address"),
])  # fmt: skip
def test_only_interfaces_to_other_machines_are_chosen(
    given: InterfaceState, is_chosen: bool
) -> None:
    thunderbolt = thunderbolt_devices(parse_hardware_ports(PORTS))
    assert thunderbolt == {"en2", "en3", "bridge0"}
    assert bool(choose([given], thunderbolt)) is is_chosen


def test_a_machine_with_very_many_interfaces_uses_the_first_ones() -> None:
    assert len(choose([state(f"en{number:03}") for number in range(500)], frozenset())) == 32


def test_neighbours_are_on_the_link() -> None:
    link = Interface("en0", (IPv4Interface("10.0.0.5/24"), IPv4Interface("192.168.7.1/30")))
    near = ("10.0.0.9", "192.168.7.2", "10.0.1.9", "8.8.8.8", "fe80::1", "", "x" * 999)
    assert [one for one in near if link.has_neighbour(one)] == ["10.0.0.9", "192.168.7.2"]


def test_the_interfaces_of_this_machine_are_read() -> None:
    loopback = [
        interface_state for interface_state in read_states() if "loopback" in interface_state.flags
    ]
    assert IPv4Interface("127.0.0.1/8") in loopback[0].addresses
    assert choose(loopback, frozenset()) == []
