"""Checks of networks and systems: addresses, networks, multicast, builds and releases. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from typing import Final

from insight.doctor.cable_checks import network_of
from insight.doctor.findings import Finding
from nodeagent.doctor.check import listed, ok, warn
from schemas.node import FabricInterface, Node, NodeStatus
from schemas.quantity import counted

# Carrier-grade NAT (RFC 6598): overlays such as Tailscale use it.
_OVERLAY: Final = IPv4Network("100.64.0.0/10")
_OVERLAY_INTERFACES: Final = ("utun", "tailscale", "wg", "tun")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenedNetwork:
    """A network of this machine, on which gateways of other machines announce themselves."""

    interface: str
    gateways: tuple[str, ...]
    """Their names in messages, such as `gateway/1f2e`."""
    listened_s: float = 0.0
    is_heard: bool = False
    """True if an announcement of another machine was heard there."""


def check_networks(nodes: Sequence[Node], unreachable: frozenset[str]) -> Iterator[Finding]:
    """Yield overlays in use though a common network exists, and networks that nodes do not share.

    `unreachable` are the nodes that do not renew their lease, or whose agent does not answer from here.
    """
    reported = {node.name: node.status for node in nodes if node.status is not None}
    # An address of an overlay where a LAN is shared: traffic takes the longer way (exo#879, #2067).
    lans = {name: set(_lan_networks(status)) for name, status in reported.items()}
    by_network: dict[IPv4Network, list[str]] = {}
    for name, status in reported.items():
        fabric = status.fabric
        interface = next((i for i in fabric.interfaces if i.address == status.address), None)
        network = None if interface is None else network_of(interface)
        if network is not None and network.prefixlen < 32:
            by_network.setdefault(network, []).append(name)
        others = [other for other in reported if other != name and lans[other] & lans[name]]
        if others and _is_overlay(status.address, interface):
            shared = lans[others[0]] & lans[name]
            address = next(i.address for i in fabric.interfaces if network_of(i) in shared)
            yield warn(
                f"its address {status.address} is of an overlay network, and it shares a LAN with {others[0]}",
                f"start its agent with `--address {address}`: `sudo fleetctl service install nodeagent -- ... --address {address}`",
                node=name,
            )
    if len(by_network) < 2:
        return
    # Nodes in several networks (exo#711): announcements do not cross them, routes may be missing.
    parts = "; ".join(f"{network}: {listed(names)}" for network, names in by_network.items())
    message = f"nodes are in {len(by_network)} networks ({parts})"
    lost = [name for names in by_network.values() for name in names if name in unreachable]
    if lost:
        yield warn(
            f"{message}, and {listed(lost)} cannot be reached",
            "check the route between them; discovery does not cross networks, so name an address: `fleetctl join HOST:4002`",
        )
    else:
        yield ok(f"{message}; join Macs of another network by an address")


def _is_overlay(address: str, interface: FabricInterface | None) -> bool:
    if interface is not None and interface.name.startswith(_OVERLAY_INTERFACES):
        return True
    try:
        return IPv4Address(address) in _OVERLAY
    except ValueError:
        return False


def _lan_networks(status: NodeStatus) -> Iterator[IPv4Network]:
    """Yield the networks that several Macs may share: no cables, overlays and link-local addresses."""
    ports = {port.interface for port in status.fabric.ports}
    for interface in status.fabric.interfaces:
        network = network_of(interface)
        is_lan = not (
            interface.is_thunderbolt
            or interface.name in ports
            or _is_overlay(interface.address, interface)
        )
        if network is not None and is_lan and not network.is_link_local:
            yield network


def check_multicast(
    multicast: Sequence[ListenedNetwork], answering: frozenset[str]
) -> Iterator[Finding]:
    """Yield networks that carry connections and no announcements (exo#2191): access points drop multicast.

    `answering` are the gateways that answer from here; the silence of others shows nothing.
    """
    for network in multicast:
        silent = [name for name in network.gateways if name in answering]
        if network.is_heard:
            yield ok(f"announcements of other machines are heard on {network.interface}")
        elif silent:
            yield warn(
                f"{listed(silent)} answers on {network.interface}, and nothing is heard of its announcements within "
                f"{network.listened_s:.0f} s: the network drops multicast, or macOS keeps it from this program",
                "name addresses, which need no multicast: `fleetctl join HOST:4002`, or seeds, and `--gateway URL` "
                "(docs/operations/add-nodes.md#find-the-fleet-on-the-network)",
            )


def check_builds(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Yield differences of macOS and MLX between Macs; those of mlx-lm and mlx-fleet are version skew."""
    macs = [(n.name, n.status) for n in nodes if n.status is not None and n.status.os == "macOS"]
    # The version of macOS has the build in parentheses.
    builds = {
        name: status.fabric.os_build or status.os_version.partition("(")[2].rstrip(")")
        for name, status in macs
    }
    releases = {name: status.mlx_version for name, status in macs}
    rdma = "RDMA needs the same build on all Macs of a group: update the older ones"
    wrong = "ranks with different releases can give wrong answers: install one release on all Macs"
    for title, values, advice in (("macOS", builds, rdma), ("mlx", releases, wrong)):
        by_value: dict[str, list[str]] = {}
        for name, value in values.items():
            if value:
                by_value.setdefault(value, []).append(name)
        if len(by_value) > 1:
            parts = "; ".join(f"{value}: {listed(names)}" for value, names in by_value.items())
            yield warn(
                f"{counted(len(by_value), 'version', 'versions')} of {title} are in use ({parts})",
                f"{advice}; `fleetctl version --nodes` compares the Macs",
            )
        for value, names in by_value.items():
            if len(by_value) == 1 and len(names) > 1:
                yield ok(f"all {len(names)} Macs have {title} {value}")
