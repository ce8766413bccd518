"""The network of a cable between two Macs: a /30 that both ends derive from the UUIDs of their Thunderbolt ports. Pure."""

import hashlib
from ipaddress import IPv4Interface, IPv4Network
from typing import Final

NETWORKS: Final = IPv4Network("10.64.0.0/10")
"""Room for 2^20 cables: few routers give these addresses to a home or an office, and two cables seldom get one network."""
PREFIX_LENGTH: Final = 30


def cable_interface(domain: str, peer: str, *, salt: str = "") -> IPv4Interface:
    """Return the address of the port `domain` on its cable to the port `peer`, with the network of the cable.

    Both ends get the same network and different hosts; capital letters do not matter. `salt` gives other networks, for the
    Macs of a group of which one would have the same network twice.

    Raises:
        ValueError: a UUID is missing, or both are the same.

    """
    ends = sorted((domain.upper(), peer.upper()))
    if not all(ends) or ends[0] == ends[1]:
        raise ValueError(f"a cable needs the UUIDs of two ports, not {domain!r} and {peer!r}")
    digest = hashlib.sha256("\n".join(("mlx-fleet cable", *ends, salt)).encode()).digest()
    step = 1 << (32 - PREFIX_LENGTH)
    count = NETWORKS.num_addresses // step
    base = int(NETWORKS.network_address) + int.from_bytes(digest[:8]) % count * step
    return IPv4Interface((base + 1 + ends.index(domain.upper()), PREFIX_LENGTH))
