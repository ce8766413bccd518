"""Network interfaces and the commands that give one an address: parsers and command lines of Linux and macOS. Pure."""

import ipaddress
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Interface

from machinery import macos_commands


class FloatingAddressError(Exception):
    """The address cannot be held; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkInterface:
    """One interface of this machine that is up and has an Ethernet address."""

    name: str
    mac: bytes
    addresses: tuple[IPv4Interface, ...]


def parse_address(text: str) -> IPv4Interface:
    """Return the address with its prefix length; 32 if none is given.

    Raises:
        FloatingAddressError: it is not an IPv4 address for one machine.

    """
    expected = (
        "expected an IPv4 address of your network with its prefix length, such as 192.168.1.50/24"
    )
    try:
        ipv4_interface = IPv4Interface(text)
    except ValueError as error:
        raise FloatingAddressError(f"{text}: {expected}") from error
    own, network = ipv4_interface.ip, ipv4_interface.network
    is_network_own = network.prefixlen < 31 and own in (
        network.network_address,
        network.broadcast_address,
    )
    if own.is_loopback or own.is_multicast or own.is_unspecified or is_network_own:
        raise FloatingAddressError(f"{text} is not the address of one machine: {expected}")
    return ipv4_interface


def parse_ip_address_show(text: str) -> list[NetworkInterface]:
    """Return the interfaces in the output of `ip -json address show up` (iproute2). Raises ValueError."""
    network_interfaces = []
    for link in json.loads(text):
        if link.get("link_type") != "ether":
            continue
        addresses = tuple(
            IPv4Interface(f"{one['local']}/{one['prefixlen']}")
            for one in link.get("addr_info", [])
            if one.get("family") == "inet"
        )
        mac = bytes.fromhex(link["address"].replace(":", ""))
        network_interfaces.append(
            NetworkInterface(name=link["ifname"], mac=mac, addresses=addresses)
        )
    return network_interfaces


_HEAD = re.compile(r"^([A-Za-z0-9._-]+): flags=[0-9a-f]+<([A-Z0-9_,]*)>")
_ETHER = re.compile(r"^\s+ether ((?:[0-9a-f]{2}:){5}[0-9a-f]{2})")
_INET = re.compile(r"^\s+inet ([0-9.]+) netmask 0x([0-9a-f]{8})")


def parse_ifconfig(text: str) -> list[NetworkInterface]:
    """Return the interfaces in the output of macOS's `ifconfig -a inet` or `ifconfig`."""
    network_interfaces: list[NetworkInterface] = []
    name, is_up, mac = "", False, b""
    addresses: list[IPv4Interface] = []

    def end_block() -> None:
        if name and is_up and mac:
            network_interfaces.append(
                NetworkInterface(name=name, mac=mac, addresses=tuple(addresses))
            )

    for line in text.splitlines():
        if head := _HEAD.match(line):
            end_block()
            name, is_up, mac = head[1], "UP" in head[2].split(","), b""
            addresses = []
        elif ether := _ETHER.match(line):
            mac = bytes.fromhex(ether[1].replace(":", ""))
        elif inet := _INET.match(line):
            length = ipaddress.ip_address(int(inet[2], 16))
            addresses.append(IPv4Interface(f"{inet[1]}/{length}"))
    end_block()
    return network_interfaces


def choose_interface(
    found: Sequence[NetworkInterface], address: IPv4Interface, name: str
) -> NetworkInterface:
    """Return the interface of that name; without a name, the one in whose network the address is.

    Raises:
        FloatingAddressError: there is none.

    """
    known = ", ".join(interface.name for interface in found) or "none"
    if name:
        for interface in found:
            if interface.name == name:
                return interface
        raise FloatingAddressError(
            f"--floating-interface {name}: there is no such Ethernet interface, or it is down; interfaces that are up: {known}"
        )
    for interface in found:
        # An earlier process may have left the address itself behind.
        if any(address.ip in own.network and own.ip != address.ip for own in interface.addresses):
            return interface
    raise FloatingAddressError(
        f"{address.ip} is in the network of no interface of this machine (interfaces that are up: {known}). "
        "Take a free address of the clients' network, or name the interface with --floating-interface"
    )


def linux_add(address: IPv4Interface, interface: str, lifetime_s: int) -> tuple[str, ...]:
    """Return the command that adds the address, or renews its lifetime: the kernel removes it afterwards."""
    life = ("valid_lft", str(lifetime_s), "preferred_lft", str(lifetime_s))
    return ("ip", "address", "replace", str(address), "dev", interface, *life, "noprefixroute")


def linux_remove(address: IPv4Interface, interface: str) -> tuple[str, ...]:
    return ("ip", "address", "delete", str(address), "dev", interface)


def mac_add(address: IPv4Interface, interface: str) -> tuple[str, ...]:
    """Return the command that adds the address. A second address of a network has the mask of one host (ifconfig(8))."""
    return macos_commands.ADDRESS_ADD.words(interface=interface, address=str(address.ip))


def mac_remove(address: IPv4Interface, interface: str) -> tuple[str, ...]:
    return macos_commands.ADDRESS_REMOVE.words(interface=interface, address=str(address.ip))
