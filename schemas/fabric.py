"""What an agent reports of its Mac's cables: addresses, Thunderbolt, RDMA."""

from typing import Literal

from schemas.meta import ApiModel


class FabricInterface(ApiModel):
    """A network interface with an address."""

    name: str
    """Such as "en5"."""
    address: str
    """Its IPv4 address."""
    is_thunderbolt: bool = False


class ThunderboltPort(ApiModel):
    """A Thunderbolt port of the Mac, and what is at the other end of its cable."""

    receptacle: str
    """The number that macOS gives it, such as "3"."""
    interface: str = ""
    """The network interface of the port; empty if nobody could tell."""
    domain: str = ""
    """The UUID by which the other end knows this port; the same after a restart."""
    peer: str = ""
    """The UUID of the port at the other end, if that is a Mac's and no dock is between; else empty."""
    speed_gbps: int = 0
    """What the cable carries, in Gbit/s; 0 where there is none. RDMA needs Thunderbolt 5: 80 or more."""
    is_bridged: bool = False
    """Whether its interface belongs to the Thunderbolt Bridge, which RDMA does not go with."""


class RdmaDevice(ApiModel):
    """An RDMA device, which is one Thunderbolt port."""

    name: str
    """Such as "rdma_en5"."""
    interface: str = ""
    """The network interface of the same port; empty if nobody could tell."""
    state: Literal["Active", "Down", "Unknown"] = "Unknown"
    """Active means that a cable with a Mac at its other end is in the port."""


class NodeFabric(ApiModel):
    """The cables of one Mac."""

    interfaces: tuple[FabricInterface, ...] = ()
    ports: tuple[ThunderboltPort, ...] = ()
    """Its Thunderbolt ports, in order of the numbers."""
    rdma: tuple[RdmaDevice, ...] = ()
    is_rdma_enabled: bool | None = None
    """Whether `rdma_ctl` says that RDMA is on; None where there is no such command."""
    thunderbolt: int = 0
    """The newest Thunderbolt that the Mac speaks, such as 5; 0 if nobody could tell."""
    os_build: str = ""
    """Such as "25C56": JACCL wants the same build everywhere."""
