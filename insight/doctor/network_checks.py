"""Checks of networks and systems: addresses, networks, multicast, builds and releases. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from typing import Final

from insight.doctor.cable_checks import network_of
from insight.doctor.findings import Finding, ok
from schemas.node import FabricInterface, Node, NodeStatus
from schemas.quantity import counted

# Carrier-grade NAT (RFC 6598): overlays such as Tailscale use it.
_OVERLAY: Final = IPv4Network("100.64.0.0/10")
_OVERLAY_INTERFACES: Final = ("utun", "tailscale", "wg", "tun")
_MAX_NAMES: Final = 5


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
    yield from _overlays(reported)
    yield from _several_networks(reported, unreachable)


def _overlays(nodes: Mapping[str, NodeStatus]) -> Iterator[Finding]:
    """Yield addresses of an overlay where a LAN is shared: traffic takes the longer way (exo#879, #2067)."""
    lans = {name: set(_lan_networks(status)) for name, status in nodes.items()}
    for name, status in nodes.items():
        interface = _own_interface(status)
        if not _is_overlay(status.address, interface):
            continue
        others = [other for other in nodes if other != name and lans[other] & lans[name]]
        if others:
            own = next(
                one.address
                for one in status.fabric.interfaces
                if network_of(one) in lans[others[0]] & lans[name]
            )
            yield Finding(
                check="networks",
                level="WARN",
                node=name,
                message=f"its address {status.address} is of an overlay network, and it shares a LAN with {others[0]}",
                advice=f"start its agent with `--address {own}`: `sudo fleetctl service install nodeagent -- ... --address {own}`",
            )


def _own_interface(status: NodeStatus) -> FabricInterface | None:
    """Return the interface with the node's address."""
    found = status.fabric.interfaces
    return next((one for one in found if one.address == status.address), None)


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
    for one in status.fabric.interfaces:
        network = network_of(one)
        is_lan = not (one.is_thunderbolt or one.name in ports or _is_overlay(one.address, one))
        if network is not None and is_lan and not network.is_link_local:
            yield network


def _several_networks(
    nodes: Mapping[str, NodeStatus], unreachable: frozenset[str]
) -> Iterator[Finding]:
    """Yield that nodes are in several networks (exo#711): announcements do not cross them, routes may be missing."""
    by_network: dict[IPv4Network, list[str]] = {}
    for name, status in nodes.items():
        interface = _own_interface(status)
        network = None if interface is None else network_of(interface)
        if network is not None and network.prefixlen < 32:
            by_network.setdefault(network, []).append(name)
    if len(by_network) < 2:
        return
    parts = "; ".join(f"{network}: {_listed(names)}" for network, names in by_network.items())
    message = f"nodes are in {len(by_network)} networks ({parts})"
    lost = [name for names in by_network.values() for name in names if name in unreachable]
    if not lost:
        yield ok("networks", f"{message}; join Macs of another network by an address")
        return
    yield Finding(
        check="networks",
        level="WARN",
        message=f"{message}, and {_listed(lost)} cannot be reached",
        advice="check the route between them; discovery does not cross networks, so name an address: `fleetctl join HOST:4002`",
    )


def check_multicast(
    networks: Sequence[ListenedNetwork], answering: frozenset[str]
) -> Iterator[Finding]:
    """Yield networks that carry connections and no announcements (exo#2191): access points drop multicast.

    `answering` are the gateways that answer from here; the silence of others shows nothing.
    """
    for one in networks:
        silent = [name for name in one.gateways if name in answering]
        if one.is_heard:
            yield ok("multicast", f"announcements of other machines are heard on {one.interface}")
        elif silent:
            yield Finding(
                check="multicast",
                level="WARN",
                message=f"{_listed(silent)} answers on {one.interface}, and nothing is heard of its announcements within "
                f"{one.listened_s:.0f} s: the network drops multicast, or macOS keeps it from this program",
                advice="name addresses, which need no multicast: `fleetctl join HOST:4002`, or seeds, and `--gateway URL` "
                "(docs/operations/add-nodes.md#find-the-fleet-on-the-network)",
            )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _build_of(status: NodeStatus) -> str:
    """Return the build of macOS; empty if unknown. The version has it in parentheses."""
    return status.fabric.os_build or status.os_version.partition("(")[2].rstrip(")")


def check_builds(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Yield differences of macOS and MLX between Macs; those of mlx-lm and mlx-fleet are version skew."""
    macs = [(n.name, n.status) for n in nodes if n.status is not None and n.status.os == "macOS"]
    builds = {name: build for name, status in macs if (build := _build_of(status))}
    releases = {name: status.mlx_version for name, status in macs if status.mlx_version}
    for title, values, advice in (
        (
            "macOS",
            builds,
            "RDMA needs the same build on all Macs of a group: update the older ones",
        ),
        (
            "mlx",
            releases,
            "ranks with different releases can give wrong answers: install one release on all Macs",
        ),
    ):
        by_value: dict[str, list[str]] = {}
        for name, value in values.items():
            by_value.setdefault(value, []).append(name)
        if len(by_value) > 1:
            parts = "; ".join(f"{value}: {_listed(names)}" for value, names in by_value.items())
            yield Finding(
                check="builds",
                level="WARN",
                message=f"{counted(len(by_value), 'version', 'versions')} of {title} are in use ({parts})",
                advice=f"{advice}; `fleetctl version --nodes` compares the Macs",
            )
        elif len(values) > 1:
            yield ok("builds", f"all {len(values)} Macs have {title} {next(iter(by_value))}")
