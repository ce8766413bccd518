"""The Thunderbolt cables between the Macs of a group, out of what their agents report; what is wrong with each. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from reconciler.groups.missing import Missing
from schemas.fabric import RdmaDevice, ThunderboltPort
from schemas.node import NodeStatus
from schemas.shardgroup import GroupMember

# Thunderbolt 5 carries 80 Gbit/s each way; a cable of before holds two such ports down to 40.
_TB5_GBPS = 80
# The port next to Ethernet of a Mac Studio has a device, but does no RDMA (exo PR 1543): M4 Max, M3 Ultra.
_STUDIOS = ("Mac16,9", "Mac15,14")
_NEXT_TO_ETHERNET = "en2"


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """One end of a cable."""

    node: str
    status: NodeStatus
    device: str
    """The RDMA device; empty if the port has none."""
    port: ThunderboltPort | None
    """None if a person named the device and the agent knows no port of it."""

    @property
    def seen(self) -> RdmaDevice | None:
        """Return the device as the agent reports it."""
        return next((one for one in self.status.fabric.rdma if one.name == self.device), None)

    @property
    def interface(self) -> str:
        if self.port is not None and self.port.interface:
            return self.port.interface
        return self.seen.interface if self.seen is not None else ""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the IPv4 addresses of its interface."""
        found = self.status.fabric.interfaces
        return tuple(one.address for one in found if one.name == self.interface)

    @property
    def place(self) -> str:
        """Return which end it is, for people."""
        if self.port is not None and self.port.receptacle:
            return f"Thunderbolt {self.port.receptacle} of {self.node}"
        return f"{self.device} of {self.node}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cable:
    """A cable between two Macs."""

    here: End
    there: End

    def turned(self) -> "Cable":
        return Cable(here=self.there, there=self.here)


Named = tuple[str, NodeStatus]
Members = Mapping[str, GroupMember]


def between(one: Named, other: Named, members: Members) -> tuple[Cable, ...] | Missing:
    """Return the cables between two Macs, seen from the first: as the members say, else as the agents found them.

    Both ends list them in the same order: MLX joins the n-th device here to the n-th there.
    """
    here, there = _given(one[0], other[0], members), _given(other[0], one[0], members)
    if not here and not there:
        return _found(one, other)
    if len(here) != len(there):
        return Missing(
            reason="DevicesDiffer",
            message=f"spec.members names {len(here)} RDMA devices of {one[0]} towards {other[0]}, and {len(there)} "
            f"of {other[0]} towards {one[0]}; name one for each cable at both ends, or none at either",
        )
    ends = zip(here, there, strict=True)
    return tuple(Cable(here=_end(one, a), there=_end(other, b)) for a, b in ends)


def _given(node: str, towards: str, members: Members) -> tuple[str, ...]:
    return members[node].rdma.get(towards, ()) if node in members else ()


def _end(node: Named, device: str) -> End:
    fabric = node[1].fabric
    seen = next((one for one in fabric.rdma if one.name == device), None)
    interface = seen.interface if seen is not None else ""
    port = next((one for one in fabric.ports if interface and one.interface == interface), None)
    return End(node=node[0], status=node[1], device=device, port=port)


def _found(one: Named, other: Named) -> tuple[Cable, ...]:
    """Return the cables by the UUIDs of their ends; one end is enough, as agents do not look at the same moment."""
    pairs = [
        (a, b)
        for a in one[1].fabric.ports
        for b in other[1].fabric.ports
        if (a.domain and a.domain == b.peer) or (b.domain and b.domain == a.peer)
    ]
    # In an order that does not depend on who is first: by the ports of the Mac whose name is first.
    is_first = one[0] < other[0]
    pairs.sort(key=lambda pair: _number(pair[0] if is_first else pair[1]))
    return tuple(Cable(here=_at(one, a), there=_at(other, b)) for a, b in pairs)


def _number(port: ThunderboltPort) -> tuple[int, str, str]:
    return (len(port.receptacle), port.receptacle, port.domain)


def _at(node: Named, port: ThunderboltPort) -> End:
    devices = node[1].fabric.rdma
    device = next((d.name for d in devices if d.interface and d.interface == port.interface), "")
    return End(node=node[0], status=node[1], device=device, port=port)


def faults(cable: Cable) -> Iterator[Missing]:
    """Yield what is wrong with a cable and the settings of its ends."""
    here, there = cable.here, cable.there
    speeds = [end.port.speed_gbps for end in (here, there) if end.port is not None]
    known = [speed for speed in speeds if speed > 0]
    if known and min(known) < _TB5_GBPS:
        yield Missing(
            reason="SlowCable",
            message=f"the cable from {here.place} to {there.place} carries {min(known)} Gbit/s: RDMA needs "
            f"Thunderbolt 5, which carries {_TB5_GBPS}; use such a cable",
        )
    for end, other in ((here, there), (there, here)):
        yield from _wrong_end(end, other)
    same = set(here.addresses) & set(there.addresses)
    if same:
        yield Missing(
            reason="SameAddress",
            message=f"both ends of the cable from {here.place} to {there.place} have the address {min(same)}; give "
            "each cable a small network of its own, such as 10.0.1.1/30 and 10.0.1.2/30",
        )


def _wrong_end(end: End, other: End) -> Iterator[Missing]:
    seen = end.seen
    if seen is None:
        # That a Mac has no devices at all was said of the Mac.
        if end.status.fabric.rdma:
            yield _no_device(end, other)
        return
    if _leads_elsewhere(end, other):
        yield Missing(
            reason="WrongCable",
            message=f"the cable in {end.place} ({end.device}) does not lead to {other.place}: names may have changed "
            "at a restart; correct spec.members[].rdma, or leave it out and agents find the cables",
        )
        return
    if seen.state == "Down":
        yield Missing(reason="PortDown", message=_port_down(end, other))
    if end.port is not None and end.port.is_bridged:
        yield Missing(
            reason="InBridge",
            message=f"{end.interface} of {end.node}, the cable to {other.node}, belongs to the Thunderbolt Bridge; "
            "delete the bridge in System Settings, Network, ..., Manage Virtual Interfaces (`sudo ifconfig bridge0 "
            "down` does until the next restart)",
        )
    if end.interface and not end.addresses:
        yield Missing(
            reason="NoLinkAddress",
            message=f"{end.interface} of {end.node}, the cable to {other.node}, has no IPv4 address, without which "
            f"JACCL cannot use it; give each cable a small network of its own, such as `sudo ifconfig {end.interface} "
            "inet 10.0.1.1 netmask 255.255.255.252` (until the next restart), or the same by hand in System Settings",
        )


def _leads_elsewhere(end: End, other: End) -> bool:
    if end.port is None or not end.port.peer:
        return False
    if other.port is None:
        known = {port.domain for port in other.status.fabric.ports}
        return bool(known) and end.port.peer not in known
    return end.port.peer != other.port.domain and other.port.peer != end.port.domain


def _no_device(end: End, other: End) -> Missing:
    listed = ", ".join(one.name for one in end.status.fabric.rdma)
    what = f"no RDMA device {end.device}" if end.device else f"no RDMA device for {end.place}"
    return Missing(
        reason="NoDevice",
        message=f"{end.node} has {what}, the cable to {other.node}; it has {listed}. Use a port that has one; "
        "names change at restarts, so leave spec.members[].rdma out unless agents cannot find the cables",
    )


def _port_down(end: End, other: End) -> str:
    said = (
        f"{end.device} of {end.node}, the cable to {other.node}, is PORT_DOWN: see that RDMA is on at both ends, "
        f"and pull and replug the cable; if it stays so, restart {end.node}"
    )
    if end.status.machine in _STUDIOS and end.interface == _NEXT_TO_ETHERNET:
        said += (
            ". On a Mac Studio take another port than the one next to Ethernet, which does no RDMA"
        )
    return said


def circle(nodes: Sequence[str], cabled: set[frozenset[str]]) -> tuple[str, ...]:
    """Return an order in which each has a cable to the next, and the last to the first; () if there is none."""

    def going_on(path: tuple[str, ...]) -> tuple[str, ...]:
        if len(path) == len(nodes):
            return path if frozenset((path[-1], path[0])) in cabled else ()
        onward = (
            going_on((*path, node))
            for node in nodes
            if node not in path and frozenset((path[-1], node)) in cabled
        )
        return next(filter(None, onward), ())

    return going_on((nodes[0],))


def around(ring: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return each with the next, and the last with the first; of two only one pair."""
    pairs = tuple(zip(ring, (*ring[1:], ring[0]), strict=True))
    return pairs[:1] if len(ring) == 2 else pairs
