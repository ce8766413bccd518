"""Macs with cables, as their agents report them, for tests of a group's fabric."""

from collections.abc import Iterable

from reconciler.groups.fabric import (
    ring_pairs,
)
from schemas.node import FabricInterface, NodeFabric, NodeStatus, RdmaDevice, ThunderboltPort
from schemas.shardgroup import Backend, GroupMember, ShardGroupSpec
from tests.support.reconciler_agents import node_status

Mac = tuple[str, NodeStatus]


def mac(name: str, cables: Iterable[str], *, number: int = 0) -> Mac:
    """Return a Mac with a cable to each named Mac: "a" twice is two cables, the n-th here is the n-th there."""
    ports, interfaces, rdma = [], [FabricInterface(name="en0", address=f"192.168.1.{number}")], []
    seen: dict[str, int] = {}
    for at, other in enumerate(cables, start=1):
        nth = seen[other] = seen.get(other, 0) + 1
        device = f"en{at + 1}"
        ports.append(
            ThunderboltPort(
                receptacle=str(at),
                interface=device,
                domain=f"{name}>{other}#{nth}",
                peer=f"{other}>{name}#{nth}",
                speed_gbps=80,
            )
        )
        interfaces.append(
            FabricInterface(name=device, address=f"10.{number}.{at}.1", is_thunderbolt=True)
        )
        rdma.append(RdmaDevice(name=f"rdma_{device}", interface=device, state="Active"))
    fabric = NodeFabric(
        interfaces=tuple(interfaces),
        ports=tuple(ports),
        rdma=tuple(rdma),
        is_rdma_enabled=True,
        thunderbolt=5,
        os_build="25D125",
    )
    status = node_status(name, chip="Apple M4 Pro")
    changes = {"fabric": fabric, "os": "macOS", "address": f"192.168.1.{number}"}
    return name, status.model_copy(update=changes)


def meshed(count: int) -> list[Mac]:
    names = [f"mac-{number}" for number in range(count)]
    return [
        mac(name, [other for other in names if other != name], number=at)
        for at, name in enumerate(names)
    ]


def ringed(count: int, *, wires: int = 1) -> list[Mac]:
    names = [f"mac-{number}" for number in range(count)]
    pairs = ring_pairs(names) * wires
    return [
        mac(name, [b if a == name else a for a, b in pairs if name in (a, b)], number=at)
        for at, name in enumerate(names)
    ]


def group(backend: Backend, macs: list[Mac], **member: object) -> ShardGroupSpec:
    """Return a group of the Macs, whose ranks may use the Ethernet; `member` changes the first one."""
    members = tuple(GroupMember(node=name) for name, _ in macs)
    if member:
        members = (members[0].model_copy(update=member), *members[1:])
    return ShardGroupSpec(members=members, backend=backend, allow_unencrypted_ring=True)


def with_fabric(macs: list[Mac], at: int, **changes: object) -> list[Mac]:
    name, status = macs[at]
    fabric = status.fabric.model_copy(update=changes)
    return [*macs[:at], (name, status.model_copy(update={"fabric": fabric})), *macs[at + 1 :]]


def with_port(macs: list[Mac], at: int, **changes: object) -> list[Mac]:
    first, *rest = macs[at][1].fabric.ports
    return with_fabric(macs, at, ports=(first.model_copy(update=changes), *rest))


def with_device(macs: list[Mac], at: int, **changes: object) -> list[Mac]:
    first, *rest = macs[at][1].fabric.rdma
    return with_fabric(macs, at, rdma=(first.model_copy(update=changes), *rest))


def with_status(macs: list[Mac], at: int, **changes: object) -> list[Mac]:
    name, status = macs[at]
    return [*macs[:at], (name, status.model_copy(update=changes)), *macs[at + 1 :]]
