"""Whether Macs are connected as a group's backend needs it, and how its ranks then reach each other. Pure.

Nothing about JACCL has run on hardware: rules are those of Apple's TN3205, MLX's source (`jaccl.cpp`, `rdma.cpp`) and
of what people reported.
"""

import ipaddress
from collections.abc import Iterator, Sequence
from itertools import combinations

from reconciler.groups import cables
from reconciler.groups.cables import Cable, Named, around, between
from reconciler.groups.missing import Missing
from schemas.fabric import NodeFabric
from schemas.formation import Seat
from schemas.node import NodeStatus
from schemas.shardgroup import MOST_JACCL_RANKS, ShardGroupSpec

__all__ = ["Missing", "links", "missing", "seats", "unable"]

# JACCL's ring takes this many cables between two neighbours (`RING_MAX_CONNS`); its mesh uses the first.
_MOST_WIRES = 4
_RECOVERY = (
    "start it into Recovery (hold the power button), open Utilities > Terminal, run `rdma_ctl enable` and restart; "
    "that cannot be done from afar"
)


def seats(
    group: ShardGroupSpec, nodes: Sequence[tuple[str, NodeStatus]]
) -> tuple[Seat, ...] | Missing:
    """Return how the ranks on these nodes, in rank order, reach each other; or the first thing that is missing."""
    first = next(missing(group, nodes), None)
    if first is not None:
        return first
    rdma = _devices(group, nodes) if group.backend != "ring" else [()] * len(nodes)
    return tuple(
        Seat(
            node=name,
            addresses=_addresses(group, name, status),
            rdma=devices,
            meeting=_meeting(group, name, status, len(nodes)),
        )
        for (name, status), devices in zip(nodes, rdma, strict=True)
    )


def missing(group: ShardGroupSpec, nodes: Sequence[tuple[str, NodeStatus]]) -> Iterator[Missing]:
    """Yield everything that keeps these nodes from being the ranks of the group, in rank order."""
    if len(nodes) < 2:
        yield Missing(reason="TooFew", message="a group needs two Macs at least")
        return
    for name, status in nodes:
        yield from _unreachable(group, name, status, nodes)
    yield from _nowhere_to_meet(group, nodes)
    if group.backend == "ring":
        return
    if len(nodes) > MOST_JACCL_RANKS:
        yield Missing(
            reason="TooMany",
            message=f"JACCL connects {MOST_JACCL_RANKS} Macs at most, and these are {len(nodes)}; write backend: ring, "
            "or a smaller size",
        )
        return
    for name, status in nodes:
        yield from unable(name, status)
    yield from _unlike_builds(nodes)
    yield from _uncabled(group, nodes)


def links(
    group: ShardGroupSpec, nodes: Sequence[tuple[str, NodeStatus]]
) -> tuple[tuple[Cable, ...], ...]:
    """Return the cables that the backend needs, pair by pair, seen from the lower rank; () for a pair without."""
    members = {member.node: member for member in group.members}
    found = (between(one, other, members) for one, other in _pairs(group, nodes))
    return tuple(() if isinstance(some, Missing) else some for some in found)


def _addresses(group: ShardGroupSpec, name: str, status: NodeStatus) -> tuple[str, ...]:
    """Return where a rank listens for its neighbours: as its member says, else on the ordinary network."""
    own = next((member.addresses for member in group.members if member.node == name), ())
    return own or ((status.address,) if status.address else ())


def _meeting(group: ShardGroupSpec, name: str, status: NodeStatus, size: int) -> str:
    """Return where all ranks reach this one, if that is not the first of its addresses."""
    return status.address if _is_on_a_cable(group, name, status, size) else ""


def _is_on_a_cable(group: ShardGroupSpec, name: str, status: NodeStatus, size: int) -> bool:
    """Return whether the first of its addresses is a cable's, where not all ranks can meet.

    Those who are not at its other end do not reach it, as in the circles that `mlx.distributed_config` sets up; and
    exo (PR 1059) saw JACCL fail where it met on a cable that carries RDMA.
    """
    first = _addresses(group, name, status)[:1]
    ports = {port.interface for port in status.fabric.ports if port.interface}
    cabled = {one.address for one in status.fabric.interfaces if one.name in ports}
    return bool(cabled.intersection(first)) and (size > 2 or group.backend != "ring")


def _unreachable(
    group: ShardGroupSpec, name: str, status: NodeStatus, nodes: Sequence[Named]
) -> Iterator[Missing]:
    addresses = _addresses(group, name, status)
    if not addresses:
        yield Missing(
            reason="NoAddress",
            message=f"{name} reports no address; write one in spec.members[].addresses",
        )
    there = [one.address for one in status.fabric.interfaces]
    is_one_machine = len({other.hardware_uuid for _, other in nodes}) == 1
    for address in addresses:
        number = _number(address)
        if number is None:
            continue  # a name: agents resolve it
        if number.is_loopback and not is_one_machine:
            yield Missing(
                reason="LoopbackAddress",
                message=f"{address} of {name} is reached from that machine alone; start its agent with "
                "--node-address, or write spec.members[].addresses",
            )
        # A rank binds its address, so it must be the machine's own; IPv6 ones are not reported.
        is_known = bool(there) and number.version == 4 and not number.is_loopback
        if is_known and address not in there:
            yield Missing(
                reason="NotItsAddress",
                message=f"{name} has no address {address}; it has {', '.join(there)}. Correct "
                "spec.members[].addresses or the agent's --node-address",
            )


def _nowhere_to_meet(group: ShardGroupSpec, nodes: Sequence[Named]) -> Iterator[Missing]:
    name, status = nodes[0]
    if not _is_on_a_cable(group, name, status, len(nodes)):
        return
    number = _number(status.address)
    if not status.address or (number is not None and number.is_loopback):
        yield Missing(
            reason="NoMeetingPlace",
            message=f"the address of {name} in spec.members is that of one cable, and all ranks have to meet there; "
            "start its agent with a --node-address on a network that every member is in",
        )


def _number(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(address)
    except ValueError:
        return None


def unable(name: str, status: NodeStatus) -> Iterator[Missing]:
    """Yield why a Mac can do no RDMA at all: the first reason, as the later ones follow from it."""
    fabric = status.fabric
    if status.os != "macOS":
        yield Missing(
            reason="NotAMac",
            message=f"{name} runs {status.os}; JACCL needs Macs with Thunderbolt 5. Write backend: ring",
        )
    elif fabric == NodeFabric():
        yield Missing(
            reason="FabricUnknown",
            message=f"{name} has not reported its cables; its agent's log says why, or it is of an older version",
        )
    elif fabric.thunderbolt < 5:
        speaks = f"speaks Thunderbolt {fabric.thunderbolt}" if fabric.thunderbolt else "has none"
        yield Missing(
            reason="NoThunderbolt5",
            message=f"RDMA needs Thunderbolt 5, and {name} ({status.chip}) {speaks}; write backend: ring",
        )
    elif fabric.is_rdma_enabled is None:
        yield Missing(
            reason="NoRdma",
            message=f"{name} has no working rdma_ctl; RDMA came with macOS 26.2, and it runs {status.os_version}",
        )
    elif not fabric.is_rdma_enabled:
        yield Missing(reason="RdmaOff", message=f"RDMA is off on {name}: {_RECOVERY}")
    elif not fabric.rdma:
        yield Missing(
            reason="NoRdmaDevice",
            message=f"rdma_ctl says that RDMA is on at {name}, but ibv_devinfo lists no device; restart it, and if "
            "that does not help switch RDMA off and on again in Recovery (mlx#3777)",
        )


def _unlike_builds(nodes: Sequence[Named]) -> Iterator[Missing]:
    by_build: dict[str, list[str]] = {}
    for name, status in nodes:
        if status.os == "macOS" and status.fabric != NodeFabric():
            by_build.setdefault(status.fabric.os_build or "an unknown build", []).append(name)
    if len(by_build) > 1:
        said = "; ".join(f"{', '.join(names)}: {build}" for build, names in by_build.items())
        yield Missing(
            reason="BuildsDiffer",
            message=f"JACCL needs the same build of macOS everywhere ({said}); update the older ones",
        )


def _pairs(group: ShardGroupSpec, nodes: Sequence[Named]) -> tuple[tuple[Named, Named], ...]:
    """Return who must have a cable to whom."""
    if group.backend == "jaccl-ring":
        known = dict(nodes)
        return tuple(((a, known[a]), (b, known[b])) for a, b in around([name for name, _ in nodes]))
    return tuple(combinations(nodes, 2))


def _uncabled(group: ShardGroupSpec, nodes: Sequence[Named]) -> Iterator[Missing]:
    members = {member.node: member for member in group.members}
    bare: list[tuple[str, str]] = []
    for one, other in _pairs(group, nodes):
        found = between(one, other, members)
        if isinstance(found, Missing):
            yield found
        elif not found:
            # Who reports no ports was named above.
            if one[1].fabric.ports and other[1].fabric.ports:
                bare.append((one[0], other[0]))
        elif not any(_is_sound(cable) for cable in found):
            yield from cables.faults(found[0])
    if bare:
        yield _no_cables(group, nodes, bare)


def _is_sound(cable: Cable) -> bool:
    return next(cables.faults(cable), None) is None


def _no_cables(
    group: ShardGroupSpec, nodes: Sequence[Named], bare: Sequence[tuple[str, str]]
) -> Missing:
    """Name the cables that are not there, and what would do with those that are."""
    names = [name for name, _ in nodes]
    cabled = {
        frozenset((one[0], other[0]))
        for one, other in combinations(nodes, 2)
        if not isinstance(found := between(one, other, {m.node: m for m in group.members}), Missing)
        and found
    }
    wants = "between any two" if group.backend == "jaccl" else "from each to the next, in a circle"
    said = ", ".join(f"{one} and {other}" for one, other in bare)
    ring = cables.circle(names, cabled) if len(names) > 2 else ()
    hint = ""
    if ring and group.backend == "jaccl":
        hint = f", or write backend: jaccl-ring with members in the order {', '.join(ring)}"
    elif ring:
        hint = f", or write members in the order {', '.join(ring)}"
    return Missing(
        reason="NoCable",
        message=f"no Thunderbolt cable between {said}; backend {group.backend} needs one {wants}: plug in what is "
        f"missing{hint}",
    )


def _devices(group: ShardGroupSpec, nodes: Sequence[Named]) -> list[tuple[tuple[str, ...], ...]]:
    """Return each rank's devices towards each rank; of parallel cables the sound ones, as many for every pair."""
    found = {
        (some[0].here.node, some[0].there.node): [one for one in some if _is_sound(one)]
        for some in links(group, nodes)
    }
    most = 1 if group.backend == "jaccl" else _MOST_WIRES
    wires = min(most, *(len(some) for some in found.values()))
    towards: dict[tuple[str, str], tuple[str, ...]] = {}
    for (one, other), some in found.items():
        towards[one, other] = tuple(cable.here.device for cable in some[:wires])
        towards[other, one] = tuple(cable.there.device for cable in some[:wires])
    names = [name for name, _ in nodes]
    return [tuple(towards.get((one, other), ()) for other in names) for one in names]
