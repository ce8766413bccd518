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
    rdma: tuple[RdmaDevice, ...] = ()
    is_rdma_enabled: bool | None = None
    """Whether `rdma_ctl` says that RDMA is on; None where there is no such command."""
    thunderbolt: int = 0
    """The newest Thunderbolt that the Mac speaks, such as 5; 0 if nobody could tell."""
    os_build: str = ""
    """Such as "25C56": JACCL wants the same build everywhere."""
