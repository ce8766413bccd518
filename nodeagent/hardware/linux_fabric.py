"""Which addresses a Linux machine has. There is no RDMA that MLX knows there, so nothing else is looked at."""

import socket
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import psutil

from schemas.fabric import FabricInterface, NodeFabric

_LOOPBACK: Final = "127."
# What the kernel's driver for IP over Thunderbolt calls its interfaces.
_THUNDERBOLT: Final = "thunderbolt"


class Address(Protocol):
    """An address as psutil has it."""

    @property
    def family(self) -> int: ...

    @property
    def address(self) -> str: ...


def parse(interfaces: Mapping[str, Sequence[Address]]) -> NodeFabric:
    """Return the IPv4 addresses of every interface but loopback."""
    return NodeFabric(
        interfaces=tuple(
            FabricInterface(
                name=name, address=one.address, is_thunderbolt=name.startswith(_THUNDERBOLT)
            )
            for name in sorted(interfaces)
            for one in interfaces[name]
            if one.family == socket.AF_INET and not one.address.startswith(_LOOPBACK)
        )
    )


def read() -> NodeFabric:
    """Return how this machine is reached.

    Raises:
        OSError: the system does not say.

    """
    return parse(psutil.net_if_addrs())
