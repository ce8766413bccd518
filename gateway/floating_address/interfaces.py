"""The network interfaces of this machine, and the one that a floating address belongs to."""

import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Interface
from typing import Any, Final

import psutil

_MAC_BYTES: Final = 6


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


def list_interfaces() -> list[NetworkInterface]:
    """Return the Ethernet interfaces of this machine that are up. Raises OSError."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return ethernet_interfaces(psutil.net_if_addrs(), up)


def ethernet_interfaces(
    addresses_of: Mapping[str, Sequence[Any]], up: Collection[str]
) -> list[NetworkInterface]:
    """Return those interfaces that are Ethernet and up. The addresses are psutil's, whose type is private."""
    interfaces = list[NetworkInterface]()
    for name, addresses in addresses_of.items():
        texts = [address.address for address in addresses if address.family == psutil.AF_LINK]
        mac = bytes.fromhex(texts[0].replace(":", "")) if texts else b""
        is_ethernet = len(mac) == _MAC_BYTES and any(mac)  # the loopback has zeros, tunnels nothing
        if not is_ethernet or name not in up:
            continue
        ipv4 = tuple(
            IPv4Interface(f"{address.address}/{address.netmask or 32}")
            for address in addresses
            if address.family == socket.AF_INET
        )
        interfaces.append(NetworkInterface(name=name, mac=mac, addresses=ipv4))
    return interfaces


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
