"""The links between two Macs: which address of the other one is reached over a Thunderbolt cable, a wire or Wi-Fi. Pure."""

import ipaddress
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from schemas.blob_share import LinkMedium, ModelLink, ModelOffer
from schemas.node import FabricInterface, NodeFabric

_RANKS: Final[dict[LinkMedium, int]] = {"Thunderbolt": 0, "Wired": 1, "Wireless": 2}
_UNKNOWN_RANK: Final = _RANKS["Wired"]
# What an interface carries that does not tell: gigabit Ethernet, and Wi-Fi in another room.
_WIRED_BYTES_PER_S: Final = 125e6
_WIRELESS_BYTES_PER_S: Final = 50e6


@dataclass(frozen=True, slots=True)
class Route:
    """A URL of another node, and how good the link to it is: 0 is the best."""

    url: str
    rank: int


def is_cable(interface: FabricInterface, fabric: NodeFabric) -> bool:
    """Return whether an interface is a Thunderbolt port, or the bridge over several."""
    return interface.is_thunderbolt or interface.name in {port.interface for port in fabric.ports}


def without_cables(fabric: NodeFabric) -> NodeFabric:
    """Return the networks that are left while the cables carry the exchange of a shard group."""
    rest = tuple(interface for interface in fabric.interfaces if not is_cable(interface, fabric))
    return fabric.model_copy(update={"interfaces": rest})


def link_rate(fabric: NodeFabric, address: str) -> float | None:
    """Return the bytes a second of the network that an own address is in; None for a cable, and if nothing is known."""
    for interface in fabric.interfaces:
        if interface.address == address and not is_cable(interface, fabric):
            assumed = _WIRELESS_BYTES_PER_S if interface.is_wireless else _WIRED_BYTES_PER_S
            return interface.speed_mbps * 125_000.0 or assumed
    return None


def own_links(fabric: NodeFabric, urls: Iterable[str]) -> tuple[ModelLink, ...]:
    """Return the links of a node at the URLs on which it listens; those without a known interface are left out."""
    media = {interface.address: _medium(interface, fabric) for interface in fabric.interfaces}
    hosts = {url: urlsplit(url).hostname or "" for url in urls}
    return tuple(
        ModelLink(url=url, medium=media[host]) for url, host in hosts.items() if host in media
    )


def routes(offer: ModelOffer, fabric: NodeFabric, is_failed: Callable[[str], bool]) -> list[Route]:
    """Return the URLs by which a node is asked, the best first: the one in its offer, and those on a common network.

    A link is as good as the worse of its ends. Of an address that is the node's own choice (169.254/16), the interface
    must be unique, as the address does not tell it.
    """
    found = []
    for link in offer.links:
        own = _common_interfaces(link.url, fabric)
        host = ipaddress.ip_address(urlsplit(link.url).hostname or "")
        is_ambiguous = host.is_link_local and len(own) != 1
        if own and not is_ambiguous:
            nearest = min(_RANKS[_medium(interface, fabric)] for interface in own)
            found.append(Route(link.url, max(nearest, _RANKS[link.medium])))
    if all(route.url != offer.url for route in found):
        found.append(Route(offer.url, _UNKNOWN_RANK))
    usable = [one for one in found if one.url == offer.url or not is_failed(one.url)]
    return sorted(usable, key=lambda one: one.rank)


def _common_interfaces(url: str, fabric: NodeFabric) -> list[FabricInterface]:
    """Return the interfaces whose network the address of a URL is in."""
    host = ipaddress.ip_address(urlsplit(url).hostname or "")
    return [
        interface
        for interface in fabric.interfaces
        if interface.prefix_length
        and host
        in ipaddress.ip_network(f"{interface.address}/{interface.prefix_length}", strict=False)
    ]


def _medium(interface: FabricInterface, fabric: NodeFabric) -> LinkMedium:
    if is_cable(interface, fabric):
        return "Thunderbolt"
    return "Wireless" if interface.is_wireless else "Wired"
