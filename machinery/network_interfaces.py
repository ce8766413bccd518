"""The network interfaces of this machine on which local services are announced and heard."""

import asyncio
import contextlib
import ipaddress
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from machinery import macos_commands

_SYS_NET: Final = Path("/sys/class/net")
_COMMAND_S: Final = 3.0
_MAX_INTERFACES: Final = 32
# Tunnels, Apple's peer-to-peer Wi-Fi, hosts of virtual machines, and Thunderbolt ports that macOS bridges by itself.
_USELESS: Final = re.compile(
    r"(utun|awdl|llw|anpi|ipsec|gif|stf|ap|bridge|thunderbolt)\d*", re.ASCII
)
_NOT_NEEDED: Final = frozenset({"loopback", "pointopoint", "pointtopoint"})
# For carriers and overlay networks, RFC 6598; Tailscale takes its addresses from here.
_SHARED: Final = ipaddress.IPv4Network("100.64.0.0/10")


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface with its IPv4 addresses. Another value means that it has changed, or was away meanwhile."""

    name: str
    addresses: tuple[ipaddress.IPv4Interface, ...]
    carrier_changes: int = 0
    """The number of times that its link came or went; 0 where the system does not count."""

    def has_neighbour(self, address: str) -> bool:
        """Return whether an IPv4 address is on the link of this interface."""
        try:
            ipv4_address = ipaddress.IPv4Address(address)
        except ValueError:
            return False
        return any(ipv4_address in interface.network for interface in self.addresses)


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceState:
    """The state of an interface, as the system reports it."""

    name: str
    flags: frozenset[str]
    addresses: tuple[ipaddress.IPv4Interface, ...]
    carrier_changes: int = 0


def choose(states: Sequence[InterfaceState], thunderbolt: frozenset[str]) -> list[Interface]:
    """Return the interfaces that lead to other machines of a local network. Pure.

    `thunderbolt`: the devices of Thunderbolt ports, which connect the Macs of one shard group only.
    """
    interfaces = [
        Interface(interface_state.name, interface_state.addresses, interface_state.carrier_changes)
        for interface_state in sorted(states, key=lambda state: state.name)
        if {"up", "running", "multicast"} <= interface_state.flags
        and not interface_state.flags & _NOT_NEEDED
        and interface_state.name not in thunderbolt
        and not _USELESS.fullmatch(interface_state.name)
        and interface_state.addresses
        and not all(address.ip in _SHARED for address in interface_state.addresses)
    ]
    return interfaces[:_MAX_INTERFACES]


def parse_hardware_ports(networksetup: str) -> dict[str, str]:
    """Parse `networksetup -listallhardwareports`: {"Thunderbolt 2": "en6"}."""
    hardware_ports: dict[str, str] = {}
    port = ""
    for line in networksetup.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "Hardware Port":
            port = value.strip()
        elif key.strip() == "Device" and port and value.strip():
            hardware_ports[port], port = value.strip(), ""
    return hardware_ports


def thunderbolt_devices(ports: Mapping[str, str]) -> frozenset[str]:
    """Return the devices of Thunderbolt ports; Ethernet adapters with a Thunderbolt plug are none."""
    return frozenset(
        device
        for port, device in ports.items()
        if re.fullmatch(r"Thunderbolt( \d+| Bridge)?", port, re.ASCII)
    )


class InterfaceLister:
    """Lists the interfaces, and remembers which of them are Thunderbolt ports."""

    def __init__(self) -> None:
        self._names: frozenset[str] = frozenset()
        self._thunderbolt: frozenset[str] = frozenset()

    async def __call__(self) -> list[Interface]:
        """Return the interfaces that lead to other machines. Raises OSError: the system does not tell."""
        states = read_states()
        names = frozenset(state.name for state in states)
        if sys.platform == "darwin" and names != self._names:
            self._thunderbolt = thunderbolt_devices(await asyncio.to_thread(_hardware_ports))
        self._names = names
        return choose(states, self._thunderbolt)


def read_states() -> list[InterfaceState]:
    """Return all interfaces of this machine. Raises OSError."""
    try:
        addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    except psutil.Error as error:
        raise OSError(str(error)) from error
    interface_states = []
    for name, stats in states.items():
        own = []
        for snicaddr in addresses.get(name, ()):
            if snicaddr.family == socket.AF_INET and snicaddr.netmask:
                with contextlib.suppress(ValueError):
                    own.append(ipaddress.IPv4Interface(f"{snicaddr.address}/{snicaddr.netmask}"))
        flags = frozenset(stats.flags.split(","))
        interface_states.append(
            InterfaceState(
                name=name, flags=flags, addresses=tuple(own), carrier_changes=_changes(name)
            )
        )
    return interface_states


def _changes(name: str) -> int:
    """Return how often the link of an interface came and went (Linux)."""
    try:
        return int((_SYS_NET / name / "carrier_changes").read_text())
    except (OSError, ValueError):
        return 0


def _hardware_ports() -> dict[str, str]:
    command = macos_commands.HARDWARE_PORTS.argv()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_S, check=False
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return {}
    return parse_hardware_ports(done.stdout)
