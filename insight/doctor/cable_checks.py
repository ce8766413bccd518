"""Checks of cables and RDMA of every Mac, in a ShardGroup or not, from the reports of agents. Pure.

Sources: reports of users of MLX and exo, named at each check. `reconciler/groups/fabric.py` judges what a group needs.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Interface, IPv4Network
from typing import Final

from insight.doctor.findings import Finding
from nodeagent.doctor.check import fail, ok, warn
from nodeagent.hardware.rdma_failures import QUEUE_PAIRS, RESTART, find_failure
from schemas import local_network
from schemas.meta import ConditionStatus, find_condition
from schemas.node import FabricInterface, Node, NodeFabric
from schemas.quantity import counted
from schemas.replica import Replica
from schemas.shardgroup import ShardGroup

_THUNDERBOLT_5: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProbe:
    """A connection over one cable of this machine, from the address of the cable."""

    node: str
    """The node that is this machine."""
    other: str
    """The node at the other end."""
    interface: str
    source: str
    target: str
    port: int
    error: str = ""
    """Reason why the other end was not reached; empty if it was."""


def check_links(links: Sequence[LinkProbe]) -> Iterator[Finding]:
    """Yield cables over which two Macs with routes to each other do not connect (mlx#3755)."""
    failed = [link for link in links if link.error]
    for link in failed:
        yield warn(
            f"{link.other} is not reached over {link.interface}, from {link.source} to {link.target}: {link.error}",
            f"compare the masks of both ends: `ping -c 3 -S {link.source} {link.target}`. If only ping works, it is macOS's "
            f"{local_network.NAME}: {local_network.REMEDY}",
            node=link.node,
        )
    if links and not failed:
        yield ok(f"{counted(len(links), 'cable', 'cables')} of this machine can be connected over")


def check_cables(
    nodes: Sequence[Node], replicas: Sequence[Replica], groups: Sequence[ShardGroup] = ()
) -> Iterator[Finding]:
    """Yield what is wrong with cables and RDMA; nothing if all is well, because most Macs have none."""
    for node in nodes:
        if node.status is not None and node.status.os == "macOS":
            yield from _fabric_findings(node.name, node.status.fabric)
    yield from _split_cables(nodes)
    used: Counter[tuple[str, str]] = Counter()
    for replica in replicas:
        for rank in replica.spec.ranks:
            used.update((rank.node, device) for towards in rank.rdma for device in towards)
    for (name, device), count in sorted(used.items()):
        if count > QUEUE_PAIRS:
            yield warn(
                f"ranks use {device} for {count} connections, and it has {QUEUE_PAIRS} queue pairs",
                "move one of its groups to other Macs, or use backend: jaccl-ring, which needs fewer connections",
                node=name,
            )
    yield from _known_failures(replicas)
    for group in groups:
        conditions = () if group.status is None else group.status.conditions
        healthy = find_condition(conditions, "FabricHealthy")
        if healthy is not None and healthy.status is ConditionStatus.FALSE:
            yield warn(
                f"shardgroup/{group.name}: {healthy.message}",
                f"`fleetctl describe shardgroup {group.name}` shows since when; `fleetctl fabric bench {group.name}` measures again",
                since=healthy.last_transition_time,
            )


def _fabric_findings(node: str, fabric: NodeFabric) -> Iterator[Finding]:
    """Yield what is wrong with the ports of one Mac."""
    # RDMA without a device (mlx#3777); with Thunderbolt 4 there never is one (omlx#3037).
    if fabric.is_rdma_enabled and not fabric.rdma:
        if 0 < fabric.thunderbolt < _THUNDERBOLT_5:
            yield warn(
                f"RDMA is on, but its ports are Thunderbolt {fabric.thunderbolt}, which cannot do RDMA: no setting changes that",
                "use it in groups with backend: ring",
                node=node,
            )
        else:
            yield warn(
                "RDMA is on, but macOS has no RDMA device",
                f"{RESTART.replace('NODE', node)}; if that does not help, switch RDMA off and on again in Recovery",
                node=node,
            )
    # An active device whose port has no IPv4 address: ranks fail with errno 22 (mlx#3467, exo#1390).
    addressed = {interface.name for interface in fabric.interfaces}
    for device in fabric.rdma:
        if device.state == "Active" and device.interface and device.interface not in addressed:
            yield warn(
                f"{device.name} leads to another Mac, and {device.interface} has no IPv4 address: ranks fail with errno 22",
                f"on {node}: `sudo fleetctl fabric setup`",
                node=node,
            )
    # Cables in one network: packets take the wrong one, and addresses change (exo#2067).
    ports = {port.interface for port in fabric.ports if port.interface}
    by_network: dict[IPv4Network, set[str]] = {}
    for interface in fabric.interfaces:
        network = network_of(interface)
        if interface.name in ports and network is not None:
            by_network.setdefault(network, set()).add(interface.name)
    for network, names in by_network.items():
        if len(names) > 1:
            yield warn(
                f"the cables at {', '.join(sorted(names))} are in one network, {network}: packets take any of them",
                f"on {node}: `sudo fleetctl fabric setup` gives each cable a small network of its own",
                node=node,
            )


def _split_cables(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Yield cables whose ends are in different networks: one was moved, or `fabric setup` ran on one Mac only."""
    ends = {
        port.domain: (node.name, node.status.fabric, port)
        for node in nodes
        if node.status is not None
        for port in node.status.fabric.ports
        if port.domain
    }
    for domain, (name, fabric, port) in ends.items():
        if port.peer not in ends or domain > port.peer:
            continue
        other, far_fabric, far_port = ends[port.peer]
        here, there = _networks(fabric, port.interface), _networks(far_fabric, far_port.interface)
        if here and there and not here & there:
            yield warn(
                f"the cable from {port.interface} to {far_port.interface} of {other} has two networks, {min(here)} and "
                f"{min(there)}: its ends do not reach each other",
                f"`sudo fleetctl fabric setup` on {name} and on {other}",
                node=name,
            )


def _networks(fabric: NodeFabric, interface: str) -> set[IPv4Network]:
    networks = (network_of(each) for each in fabric.interfaces if each.name == interface)
    return {network for network in networks if network is not None}


def network_of(interface: FabricInterface) -> IPv4Network | None:
    """Return the network of an interface; None if its length is unknown."""
    if not interface.prefix_length:
        return None
    try:
        return IPv4Interface(f"{interface.address}/{interface.prefix_length}").network
    except ValueError:
        return None


def _known_failures(replicas: Sequence[Replica]) -> Iterator[Finding]:
    """Yield replicas that failed with words whose cause is known."""
    for replica in replicas:
        formation = replica.spec.formation
        if formation is None or replica.status is None:
            continue
        for type_, bad in (("EpochOver", ConditionStatus.TRUE), ("Ready", ConditionStatus.FALSE)):
            condition = find_condition(replica.status.conditions, type_)
            if condition is None or condition.status is not bad:
                continue
            text = condition.message
            known = find_failure(text)
            if known is None:
                continue
            # The Mac that the message names; else that of rank 0.
            names = [rank.node for rank in replica.spec.ranks]
            named = (name for name in names if re.search(rf"\b{re.escape(name)}\b", text))
            node = next(named, names[0])
            yield warn(
                f"replica/{replica.name} of shardgroup/{formation.group} failed with {known.name}: {known.cause}",
                known.advice.replace("NODE", node),
                node=node,
                since=condition.last_transition_time,
            )
            break


_MAX_NAMES = 5


def check_bridges(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Yield the loops of cables through the bridges of nodes; nothing where no cable joins two bridges."""
    ports = [
        (node.name, port)
        for node in nodes
        if node.status is not None
        for port in node.status.fabric.ports
    ]
    owners = {port.domain: name for name, port in ports if port.is_bridged and port.domain}
    # Each once, though both ends report it.
    cables = {
        (min(port.domain, port.peer), max(port.domain, port.peer))
        for _, port in ports
        if port.domain in owners and port.peer in owners
    }
    if not cables:
        return
    # A group of bridges that has more cables than a tree has a loop.
    groups = {name: frozenset((name,)) for name in owners.values()}
    looped: set[str] = set()
    for first, second in sorted(cables):
        group, other = groups[owners[first]], groups[owners[second]]
        if group is other:
            looped.add(owners[first])
        else:
            groups.update(dict.fromkeys(group | other, group | other))
    for names in sorted({tuple(sorted(groups[name])) for name in looped}):
        shown = ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")
        yield fail(
            f"cables between the Thunderbolt Bridges of {shown} make a loop, which floods all their networks",
            "on each of them: `sudo fleetctl fabric setup`",
        )
    if not looped:
        yield ok(f"{len(cables)} cables join bridges, without a loop")
