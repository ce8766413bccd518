"""The fabric of a group: cables between its Macs, faults against what its backend needs, and seats of its ranks. Pure.

JACCL has not run on hardware here. Its rules come from Apple's TN3205, from MLX's source (`jaccl.cpp`, `rdma.cpp`) and
from reports of users.
"""

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from schemas.formation import Seat
from schemas.node import FabricInterface, NodeFabric, NodeStatus, RdmaDevice, ThunderboltPort
from schemas.shardgroup import MOST_JACCL_RANKS, GroupMember, ShardGroupSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricFault:
    """One cable or setting that the backend cannot use."""

    reason: str
    """Reason code, such as "NoCable"."""
    message: str
    """Message with the cable or setting, its place, and the remedy."""


# Thunderbolt 5 carries 80 Gbit/s each way; a cable of before holds two such ports down to 40.
_TB5_GBPS = 80
# The port next to Ethernet of a Mac Studio has a device, but does no RDMA (exo PR 1543): M4 Max, M3 Ultra.
_STUDIOS = ("Mac16,9", "Mac15,14")
_NEXT_TO_ETHERNET = "en2"


@dataclass(frozen=True, slots=True, kw_only=True)
class CableEnd:
    """One end of a cable."""

    node: str
    status: NodeStatus
    device: str
    """RDMA device; empty if the port has none."""
    port: ThunderboltPort | None
    """None if the manifest names the device and the agent reports no port for it."""

    @property
    def reported(self) -> RdmaDevice | None:
        """Return the device as the agent reports it; None if it does not."""
        return next(
            (device for device in self.status.fabric.rdma if device.name == self.device), None
        )

    @property
    def interface(self) -> str:
        if self.port is not None and self.port.interface:
            return self.port.interface
        return self.reported.interface if self.reported is not None else ""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the IPv4 addresses of its interface."""
        interfaces = self.status.fabric.interfaces
        return tuple(
            interface.address for interface in interfaces if interface.name == self.interface
        )

    @property
    def place(self) -> str:
        """Return the name of this end for messages."""
        if self.port is not None and self.port.receptacle:
            return f"Thunderbolt {self.port.receptacle} of {self.node}"
        return f"{self.device} of {self.node}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cable:
    """A cable between two Macs."""

    here: CableEnd
    there: CableEnd


NamedStatus = tuple[str, NodeStatus]
Members = Mapping[str, GroupMember]


def cables_between(
    one: NamedStatus, other: NamedStatus, members: Members
) -> tuple[Cable, ...] | FabricFault:
    """Return the cables between two Macs, seen from the first: those of spec.members, else those that agents found.

    Both ends list them in the same order, because MLX connects the n-th device here with the n-th there.
    """
    here, there = _given(one[0], other[0], members), _given(other[0], one[0], members)
    if not here and not there:
        return _found(one, other)
    if len(here) != len(there):
        return FabricFault(
            reason="DevicesDiffer",
            message=f"spec.members names {len(here)} RDMA devices of {one[0]} towards {other[0]}, and {len(there)} "
            f"of {other[0]} towards {one[0]}; name one for each cable at both ends, or none at either",
        )
    ends = zip(here, there, strict=True)
    return tuple(Cable(here=_end(one, a), there=_end(other, b)) for a, b in ends)


def _given(node: str, towards: str, members: Members) -> tuple[str, ...]:
    return members[node].rdma.get(towards, ()) if node in members else ()


def _end(node: NamedStatus, device: str) -> CableEnd:
    fabric = node[1].fabric
    reported = next(
        (rdma_device for rdma_device in fabric.rdma if rdma_device.name == device), None
    )
    interface = reported.interface if reported is not None else ""
    port = next(
        (
            thunderbolt_port
            for thunderbolt_port in fabric.ports
            if interface and thunderbolt_port.interface == interface
        ),
        None,
    )
    return CableEnd(node=node[0], status=node[1], device=device, port=port)


def _found(one: NamedStatus, other: NamedStatus) -> tuple[Cable, ...]:
    """Return the cables by the UUIDs of their ends; one end is enough, because agents report at different times."""
    pairs = [
        (a, b)
        for a in one[1].fabric.ports
        for b in other[1].fabric.ports
        if (a.domain and a.domain == b.peer) or (b.domain and b.domain == a.peer)
    ]
    # Ordered by the ports of the Mac whose name is first, so that the order is the same seen from both ends.
    is_first = one[0] < other[0]
    pairs.sort(key=lambda pair: _port_number(pair[0] if is_first else pair[1]))
    return tuple(Cable(here=_at(one, a), there=_at(other, b)) for a, b in pairs)


def _port_number(port: ThunderboltPort) -> tuple[int, str, str]:
    return (len(port.receptacle), port.receptacle, port.domain)


def _at(node: NamedStatus, port: ThunderboltPort) -> CableEnd:
    devices = node[1].fabric.rdma
    device = next((d.name for d in devices if d.interface and d.interface == port.interface), "")
    return CableEnd(node=node[0], status=node[1], device=device, port=port)


def cable_faults(cable: Cable) -> Iterator[FabricFault]:
    """Yield the faults of a cable and of the settings of its ends."""
    here, there = cable.here, cable.there
    speeds = [end.port.speed_gbps for end in (here, there) if end.port is not None]
    known = [speed for speed in speeds if speed > 0]
    if known and min(known) < _TB5_GBPS:
        yield FabricFault(
            reason="SlowCable",
            message=f"the cable from {here.place} to {there.place} carries {min(known)} Gbit/s: RDMA needs "
            f"Thunderbolt 5, which carries {_TB5_GBPS}; use such a cable",
        )
    for end, other in ((here, there), (there, here)):
        yield from _wrong_end(end, other)
    same = set(here.addresses) & set(there.addresses)
    if same:
        yield FabricFault(
            reason="SameAddress",
            message=f"both ends of the cable from {here.place} to {there.place} have the address {min(same)}; "
            "run `sudo fleetctl fabric setup` on both Macs",
        )


def _wrong_end(end: CableEnd, other: CableEnd) -> Iterator[FabricFault]:
    reported = end.reported
    if reported is None:
        # A Mac without any device is a fault of the Mac, not of each cable.
        if end.status.fabric.rdma:
            yield _no_device(end, other)
        return
    if _leads_elsewhere(end, other):
        yield FabricFault(
            reason="WrongCable",
            message=f"the cable in {end.place} ({end.device}) does not lead to {other.place}: names may have changed "
            "at a restart; correct spec.members[].rdma, or leave it out and agents find the cables",
        )
        return
    if reported.state == "Down":
        yield FabricFault(reason="PortDown", message=_port_down(end, other))
    if end.port is not None and end.port.is_bridged:
        yield FabricFault(
            reason="InBridge",
            message=f"{end.interface} of {end.node}, the cable to {other.node}, belongs to the Thunderbolt Bridge; "
            f"run `sudo fleetctl fabric setup` on {end.node}",
        )
    if end.interface and not end.addresses:
        yield FabricFault(
            reason="NoLinkAddress",
            message=f"{end.interface} of {end.node}, the cable to {other.node}, has no IPv4 address, without which "
            f"JACCL cannot use it; run `sudo fleetctl fabric setup` on {end.node}",
        )


def _leads_elsewhere(end: CableEnd, other: CableEnd) -> bool:
    if end.port is None or not end.port.peer:
        return False
    if other.port is None:
        known = {port.domain for port in other.status.fabric.ports}
        return bool(known) and end.port.peer not in known
    return end.port.peer != other.port.domain and other.port.peer != end.port.domain


def _no_device(end: CableEnd, other: CableEnd) -> FabricFault:
    listed = ", ".join(device.name for device in end.status.fabric.rdma)
    what = f"no RDMA device {end.device}" if end.device else f"no RDMA device for {end.place}"
    return FabricFault(
        reason="NoDevice",
        message=f"{end.node} has {what}, the cable to {other.node}; it has {listed}. Use a port that has one; "
        "names change at restarts, so leave spec.members[].rdma out unless agents cannot find the cables",
    )


def _port_down(end: CableEnd, other: CableEnd) -> str:
    message = (
        f"{end.device} of {end.node}, the cable to {other.node}, is PORT_DOWN: see that RDMA is on at both ends, "
        f"and pull and replug the cable; if it stays so, restart {end.node}"
    )
    if end.status.machine in _STUDIOS and end.interface == _NEXT_TO_ETHERNET:
        message += (
            ". On a Mac Studio take another port than the one next to Ethernet, which does no RDMA"
        )
    return message


def find_ring(nodes: Sequence[str], cabled: set[frozenset[str]]) -> tuple[str, ...]:
    """Return an order in which each node has a cable to the next, and the last to the first; empty if there is none."""

    def extend(path: tuple[str, ...]) -> tuple[str, ...]:
        if len(path) == len(nodes):
            return path if frozenset((path[-1], path[0])) in cabled else ()
        onward = (
            extend((*path, node))
            for node in nodes
            if node not in path and frozenset((path[-1], node)) in cabled
        )
        return next(filter(None, onward), ())

    return extend((nodes[0],))


def ring_pairs(ring: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return each node with the next, and the last with the first; for two nodes one pair."""
    pairs = tuple(zip(ring, (*ring[1:], ring[0]), strict=True))
    return pairs[:1] if len(ring) == 2 else pairs


# JACCL's ring uses at most this many cables between two neighbours (`RING_MAX_CONNS`); its mesh uses the first.
_MOST_WIRES = 4
_RECOVERY = (
    "start it into Recovery (hold the power button), open Utilities > Terminal, run `rdma_ctl enable` and restart; "
    "this cannot be done remotely"
)


def assign_seats(
    group: ShardGroupSpec, nodes: Sequence[tuple[str, NodeStatus]]
) -> tuple[Seat, ...] | FabricFault:
    """Return how the ranks on these nodes reach each other, in rank order; or the first fault."""
    first = next(find_faults(group, nodes), None)
    if first is not None:
        return first
    rdma = _devices(group, nodes) if group.backend != "ring" else [()] * len(nodes)
    return tuple(
        Seat(
            node=name,
            addresses=_addresses(group, name, status),
            rdma=devices,
            meeting=_meeting_address(group, name, status, len(nodes)),
        )
        for (name, status), devices in zip(nodes, rdma, strict=True)
    )


def find_faults(
    group: ShardGroupSpec, nodes: Sequence[tuple[str, NodeStatus]]
) -> Iterator[FabricFault]:
    """Yield all faults of these nodes as ranks of the group, in rank order."""
    if len(nodes) < 2:
        yield FabricFault(reason="TooFew", message="a group needs two Macs at least")
        return
    for name, status in nodes:
        yield from _unreachable(group, name, status, nodes)
    yield from _nowhere_to_meet(group, nodes)
    yield from _on_shared_networks(group, nodes)
    if group.backend == "ring":
        return
    if len(nodes) > MOST_JACCL_RANKS:
        yield FabricFault(
            reason="TooMany",
            message=f"JACCL connects {MOST_JACCL_RANKS} Macs at most, and these are {len(nodes)}; write backend: ring, "
            "or a smaller size",
        )
        return
    for name, status in nodes:
        yield from rdma_faults(name, status)
    yield from _unlike_builds(nodes)
    yield from _uncabled(group, nodes)


def group_cables(
    group: ShardGroupSpec, nodes: Sequence[tuple[str, NodeStatus]]
) -> tuple[tuple[Cable, ...], ...]:
    """Return the cables that the backend needs, pair by pair, seen from the lower rank; empty for a pair without."""
    members = {member.node: member for member in group.members}
    found = (cables_between(one, other, members) for one, other in _pairs(group, nodes))
    return tuple(() if isinstance(some, FabricFault) else some for some in found)


def _addresses(group: ShardGroupSpec, name: str, status: NodeStatus) -> tuple[str, ...]:
    """Return the addresses where a rank listens: those of spec.members, else its node's address."""
    own = next((member.addresses for member in group.members if member.node == name), ())
    return own or ((status.address,) if status.address else ())


def _meeting_address(group: ShardGroupSpec, name: str, status: NodeStatus, size: int) -> str:
    """Return the address where all ranks reach this one, if it is not its first address."""
    return status.address if _is_on_a_cable(group, name, status, size) else ""


def _is_on_a_cable(group: ShardGroupSpec, name: str, status: NodeStatus, size: int) -> bool:
    """Return whether its first address is that of a cable, so that not all ranks can meet there.

    Only the rank at the other end reaches it, as in the rings of `mlx.distributed_config`. Also, exo (PR 1059) saw
    JACCL fail when ranks met on a cable that carries RDMA.
    """
    first = _addresses(group, name, status)[:1]
    ports = {port.interface for port in status.fabric.ports if port.interface}
    cabled = {
        interface.address for interface in status.fabric.interfaces if interface.name in ports
    }
    return bool(cabled.intersection(first)) and (size > 2 or group.backend != "ring")


def _unreachable(
    group: ShardGroupSpec, name: str, status: NodeStatus, nodes: Sequence[NamedStatus]
) -> Iterator[FabricFault]:
    addresses = _addresses(group, name, status)
    if not addresses:
        yield FabricFault(
            reason="NoAddress",
            message=f"{name} reports no address; write one in spec.members[].addresses",
        )
    there = [interface.address for interface in status.fabric.interfaces]
    is_one_machine = len({other.hardware_uuid for _, other in nodes}) == 1
    for address in addresses:
        number = _ip_address(address)
        if number is None:
            continue  # a host name, which agents resolve
        if number.is_loopback and not is_one_machine:
            yield FabricFault(
                reason="LoopbackAddress",
                message=f"only {name} itself reaches {address}; start its agent with "
                "--address, or write spec.members[].addresses",
            )
        # A rank binds its address, so the machine must have it. Agents report no IPv6 addresses.
        is_known = bool(there) and number.version == 4 and not number.is_loopback
        if is_known and address not in there:
            yield FabricFault(
                reason="NotItsAddress",
                message=f"{name} has no address {address}; it has {', '.join(there)}. Correct "
                "spec.members[].addresses or the agent's --address",
            )


def _nowhere_to_meet(group: ShardGroupSpec, nodes: Sequence[NamedStatus]) -> Iterator[FabricFault]:
    name, status = nodes[0]
    if not _is_on_a_cable(group, name, status, len(nodes)):
        return
    number = _ip_address(status.address)
    if not status.address or (number is not None and number.is_loopback):
        yield FabricFault(
            reason="NoMeetingPlace",
            message=f"the address of {name} in spec.members belongs to one cable, and all ranks must meet there; "
            "start its agent with an --address on a network that all members share",
        )


def _on_shared_networks(
    group: ShardGroupSpec, nodes: Sequence[NamedStatus]
) -> Iterator[FabricFault]:
    """Yield a fault for each rank that strangers could reach: MLX's sockets have no authentication and no encryption."""
    if group.allow_unencrypted_ring:
        return
    for rank, (name, status) in enumerate(nodes):
        used = _addresses(group, name, status)
        if not rank and (meeting := _meeting_address(group, name, status, len(nodes))):
            used = (*used, meeting)
        shared = [key for key in dict.fromkeys(used) if _is_shared(key, status)]
        if shared:
            cables = [
                interface.address
                for interface in status.fabric.interfaces
                if _is_cable(interface, status)
            ]
            hint = f" ({name} has {', '.join(cables)})" if cables else ""
            yield FabricFault(
                reason="NotPointToPoint",
                message=f"ranks exchange prompts without encryption, and {', '.join(shared)} of {name} is not known to "
                f"be on a cable between two Macs; write its Thunderbolt addresses in spec.members[].addresses{hint}, "
                "or allowUnencryptedRing: true if nobody else uses the network",
            )


def _is_shared(address: str, status: NodeStatus) -> bool:
    """Return whether more than the other end of a cable, or this machine itself, may reach the address."""
    number, interfaces = _ip_address(address), status.fabric.interfaces
    if number is None:
        return True  # a host name, whose address is not known here
    if number.is_loopback:
        return False
    at = [interface for interface in interfaces if interface.address == address]
    if at or number.version == 6:
        return not (at and all(_is_cable(fabric_interface, status) for fabric_interface in at))
    # Another Mac's address is a fault of its own. Agents that report no addresses leave only the range to go by.
    return not interfaces and not number.is_link_local


def _is_cable(interface: FabricInterface, status: NodeStatus) -> bool:
    """Return whether an interface is a Thunderbolt port, or the bridge over several."""
    ports = {port.interface for port in status.fabric.ports}
    return interface.is_thunderbolt or interface.name in ports


def _ip_address(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(address)
    except ValueError:
        return None


def rdma_faults(name: str, status: NodeStatus) -> Iterator[FabricFault]:
    """Yield the first reason why a Mac cannot do RDMA with any cable, and whether its MLX can; the rest would follow."""
    fabric, build = status.fabric, status.mlx_build
    if status.os != "macOS":
        yield FabricFault(
            reason="NotAMac",
            message=f"{name} runs {status.os}; JACCL needs Macs with Thunderbolt 5. Write backend: ring",
        )
    elif fabric == NodeFabric():
        yield FabricFault(
            reason="FabricUnknown",
            message=f"{name} has not reported its cables; its agent's log says why, or it is of an older version",
        )
    elif 0 < fabric.thunderbolt < 5:  # of a new chip it may be unknown: rdma_ctl decides
        yield FabricFault(
            reason="NoThunderbolt5",
            message=f"RDMA needs Thunderbolt 5, and {name} ({status.chip}) speaks Thunderbolt {fabric.thunderbolt}; write "
            "backend: ring",
        )
    elif fabric.is_rdma_enabled is None:
        yield FabricFault(
            reason="NoRdma",
            message=f"{name} has no working rdma_ctl; RDMA came with macOS 26.2, and it runs {status.os_version}",
        )
    elif not fabric.is_rdma_enabled:
        yield FabricFault(reason="RdmaOff", message=f"RDMA is off on {name}: {_RECOVERY}")
    elif not fabric.rdma:
        yield FabricFault(
            reason="NoRdmaDevice",
            message=f"rdma_ctl says that RDMA is on at {name}, but ibv_devinfo lists no device; restart it, and if "
            "that does not help switch RDMA off and on again in Recovery (mlx#3777)",
        )
    # Before macOS 26.2, and without Thunderbolt 5, no build has it.
    has_rdma = fabric.is_rdma_enabled is not None and not 0 < fabric.thunderbolt < 5
    if has_rdma and build is not None and not build.has_jaccl:
        yield FabricFault(
            reason="NoJacclInMlx",
            message=f"the MLX of {name} has no JACCL: it is of {build.tag or 'no wheel'}, and {name} runs macOS "
            f"{status.os_version}. The wheels for macOS 26 have JACCL: install mlx-fleet there from an archive of "
            "`fleetctl bundle create`, or in a checkout by `make clean setup`",
        )


def _unlike_builds(nodes: Sequence[NamedStatus]) -> Iterator[FabricFault]:
    by_build: dict[str, list[str]] = {}
    for name, status in nodes:
        if status.os == "macOS" and status.fabric != NodeFabric():
            by_build.setdefault(status.fabric.os_build or "an unknown build", []).append(name)
    if len(by_build) > 1:
        builds = "; ".join(f"{', '.join(names)}: {build}" for build, names in by_build.items())
        yield FabricFault(
            reason="BuildsDiffer",
            message=f"JACCL needs the same build of macOS everywhere ({builds}); update the older ones",
        )


def _pairs(
    group: ShardGroupSpec, nodes: Sequence[NamedStatus]
) -> tuple[tuple[NamedStatus, NamedStatus], ...]:
    """Return the pairs of nodes that need a cable."""
    if group.backend == "jaccl-ring":
        known = dict(nodes)
        return tuple(
            ((a, known[a]), (b, known[b])) for a, b in ring_pairs([name for name, _ in nodes])
        )
    return tuple(combinations(nodes, 2))


def _uncabled(group: ShardGroupSpec, nodes: Sequence[NamedStatus]) -> Iterator[FabricFault]:
    members = {member.node: member for member in group.members}
    bare: list[tuple[str, str]] = []
    for one, other in _pairs(group, nodes):
        found = cables_between(one, other, members)
        if isinstance(found, FabricFault):
            yield found
        elif not found:
            # A Mac that reports no ports has a fault of its own.
            if one[1].fabric.ports and other[1].fabric.ports:
                bare.append((one[0], other[0]))
        elif not any(_is_sound(cable) for cable in found):
            yield from cable_faults(found[0])
    if bare:
        yield _no_cables(group, nodes, bare)


def _is_sound(cable: Cable) -> bool:
    return next(cable_faults(cable), None) is None


def _no_cables(
    group: ShardGroupSpec, nodes: Sequence[NamedStatus], bare: Sequence[tuple[str, str]]
) -> FabricFault:
    """Return a fault with the missing cables, and a layout that works with the existing ones."""
    names = [name for name, _ in nodes]
    cabled = {
        frozenset((one[0], other[0]))
        for one, other in combinations(nodes, 2)
        if not isinstance(
            found := cables_between(one, other, {m.node: m for m in group.members}), FabricFault
        )
        and found
    }
    layout = "between any two" if group.backend == "jaccl" else "from each to the next, in a ring"
    pairs = ", ".join(f"{one} and {other}" for one, other in bare)
    ring = find_ring(names, cabled) if len(names) > 2 else ()
    hint = ""
    if ring and group.backend == "jaccl":
        hint = f", or write backend: jaccl-ring with members in the order {', '.join(ring)}"
    elif ring:
        hint = f", or write members in the order {', '.join(ring)}"
    return FabricFault(
        reason="NoCable",
        message=f"no Thunderbolt cable between {pairs}; backend {group.backend} needs one {layout}: plug in what is "
        f"missing{hint}",
    )


def _devices(
    group: ShardGroupSpec, nodes: Sequence[NamedStatus]
) -> list[tuple[tuple[str, ...], ...]]:
    """Return each rank's devices towards each other rank: sound cables only, the same number for every pair."""
    found = {
        (some[0].here.node, some[0].there.node): [one for one in some if _is_sound(one)]
        for some in group_cables(group, nodes)
    }
    most = 1 if group.backend == "jaccl" else _MOST_WIRES
    wires = min(most, *(len(some) for some in found.values()))
    towards: dict[tuple[str, str], tuple[str, ...]] = {}
    for (one, other), some in found.items():
        towards[one, other] = tuple(cable.here.device for cable in some[:wires])
        towards[other, one] = tuple(cable.there.device for cable in some[:wires])
    names = [name for name, _ in nodes]
    return [tuple(towards.get((one, other), ()) for other in names) for one in names]
