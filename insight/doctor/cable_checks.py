"""Checks of cables and RDMA of every Mac, in a ShardGroup or not, from the reports of agents. Pure.

Sources: reports of users of MLX and exo, named at each check. `reconciler/groups/fabric.py` judges what a group needs.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Interface, IPv4Network
from typing import Final

from insight.doctor.findings import Finding, ok
from schemas.meta import Condition, ConditionStatus, find_condition
from schemas.node import FabricInterface, Node, NodeFabric
from schemas.quantity import counted
from schemas.replica import Replica
from schemas.shardgroup import ShardGroup

_CHECK: Final = "cables"
_RESTART: Final = "`fleetctl node reboot NODE --drain`"
# A device of Apple's driver has ten queue pairs; each connection of a rank takes one (mlx#4209, #3162).
_QUEUE_PAIRS: Final = 10
_THUNDERBOLT_5: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFailure:
    """A failure of RDMA that MLX reports in words which do not tell its cause."""

    name: str
    pattern: re.Pattern[str]
    cause: str
    advice: str
    """The remedy; NODE is the name of the Mac."""


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

    def failed(self, error: str) -> "LinkProbe":
        """Return the link with an error."""
        return replace(self, error=error)


def check_links(links: Sequence[LinkProbe]) -> Iterator[Finding]:
    """Yield cables over which two Macs with routes to each other do not connect (mlx#3755)."""
    for one in links:
        if one.error:
            yield _finding(
                one.node,
                f"{one.other} is not reached over {one.interface}, from {one.source} to {one.target}: {one.error}",
                f"compare the masks of both ends, and macOS's local network permission: `ping -c 3 -S {one.source} {one.target}`",
            )
    if links and not any(one.error for one in links):
        yield ok(
            _CHECK,
            f"{counted(len(links), 'cable', 'cables')} of this machine can be connected over",
        )


def _words(text: str) -> re.Pattern[str]:
    return re.compile(text, re.ASCII | re.IGNORECASE)


KNOWN_FAILURES: Final = (
    KnownFailure(
        name="errno 22",
        pattern=_words(r"\berrno:? 22\b|queue pair to RTR.*invalid argument"),
        cause="the port of a cable has no IPv4 address when the ranks connect (mlx#3467)",
        advice="`fleetctl fabric check` names the port; give each cable a small network of its own",
    ),
    KnownFailure(
        name="errno 60 or 65",
        pattern=_words(r"\berrno:? (?:60|65)\b|no route to host|operation timed out"),
        cause="a rank cannot reach another one over the address of its cable, though both Macs have it (mlx#3755)",
        advice="on NODE: `ping -c 3 -S ITS-ADDRESS OTHER-ADDRESS` for each cable; compare masks and macOS's local network "
        "permission (docs/operations/shardgroups.md)",
    ),
    KnownFailure(
        name="errno 16",
        pattern=_words(r"\berrno:? 16\b|resource busy"),
        cause=f"an RDMA device has no queue pair left of its {_QUEUE_PAIRS}: killed ranks keep theirs (mlx#4209)",
        advice=f"{_RESTART}: another attempt cannot help",
    ),
    KnownFailure(
        name="protection domain",
        pattern=_words(r"protection domain|ibv_alloc_pd"),
        cause="an RDMA device cannot be used any more, or has another name since the Mac was restarted (mlx#3207)",
        advice=f"`fleetctl fabric check` compares names; if they are right, {_RESTART}",
    ),
)


def check_cables(
    nodes: Sequence[Node], replicas: Sequence[Replica], groups: Sequence[ShardGroup] = ()
) -> Iterator[Finding]:
    """Yield what is wrong with cables and RDMA; nothing if all is well, because most Macs have none."""
    for node in nodes:
        if node.status is not None and node.status.os == "macOS":
            fabric = node.status.fabric
            yield from _missing_devices(node.name, fabric)
            yield from _bare_devices(node.name, fabric)
            yield from _shared_networks(node.name, fabric)
    yield from _queue_pairs(replicas)
    yield from _known_failures(replicas)
    yield from _slow_cables(groups)


def _finding(node: str, message: str, advice: str, since: Condition | None = None) -> Finding:
    return Finding(
        check=_CHECK,
        level="WARN",
        node=node,
        message=message,
        advice=advice,
        since=None if since is None else since.last_transition_time,
    )


def _missing_devices(node: str, fabric: NodeFabric) -> Iterator[Finding]:
    """Yield that RDMA is on without a device (mlx#3777); with Thunderbolt 4 there never is one (omlx#3037)."""
    if not fabric.is_rdma_enabled or fabric.rdma:
        return
    if 0 < fabric.thunderbolt < _THUNDERBOLT_5:
        yield _finding(
            node,
            f"RDMA is on, but its ports are Thunderbolt {fabric.thunderbolt}, which cannot do RDMA: no setting changes that",
            "use it in groups with backend: ring",
        )
        return
    yield _finding(
        node,
        "RDMA is on, but macOS has no RDMA device",
        f"{_RESTART.replace('NODE', node)}; if that does not help, switch RDMA off and on again in Recovery",
    )


def _bare_devices(node: str, fabric: NodeFabric) -> Iterator[Finding]:
    """Yield active devices whose port has no IPv4 address: ranks fail with errno 22 (mlx#3467, exo#1390)."""
    addressed = {one.name for one in fabric.interfaces}
    for device in fabric.rdma:
        if device.state == "Active" and device.interface and device.interface not in addressed:
            yield _finding(
                node,
                f"{device.name} leads to another Mac, and {device.interface} has no IPv4 address: ranks fail with errno 22",
                f"on {node}: `sudo ifconfig {device.interface} inet 10.0.1.1 netmask 255.255.255.252` (until the next restart), "
                "with another network for each cable",
            )


def network_of(interface: FabricInterface) -> IPv4Network | None:
    """Return the network of an interface; None if its length is unknown."""
    if not interface.prefix_length:
        return None
    try:
        return IPv4Interface(f"{interface.address}/{interface.prefix_length}").network
    except ValueError:
        return None


def _shared_networks(node: str, fabric: NodeFabric) -> Iterator[Finding]:
    """Yield cables of a Mac in one network: packets take the wrong one, and addresses change (exo#2067)."""
    ports = {port.interface for port in fabric.ports if port.interface}
    by_network: dict[IPv4Network, list[str]] = {}
    for one in fabric.interfaces:
        network = network_of(one)
        if one.name in ports and network is not None:
            by_network.setdefault(network, []).append(one.name)
    for network, names in by_network.items():
        if len(set(names)) > 1:
            yield _finding(
                node,
                f"the cables at {', '.join(sorted(set(names)))} are in one network, {network}: packets take any of them",
                "give each cable a small network of its own, such as 10.0.1.1/30 and 10.0.1.2/30, by hand and not by DHCP",
            )


def _queue_pairs(replicas: Sequence[Replica]) -> Iterator[Finding]:
    """Yield devices with more connections of placed ranks than queue pairs."""
    used: Counter[tuple[str, str]] = Counter()
    for replica in replicas:
        for rank in replica.spec.ranks:
            used.update((rank.node, device) for towards in rank.rdma for device in towards)
    for (node, device), count in sorted(used.items()):
        if count > _QUEUE_PAIRS:
            yield _finding(
                node,
                f"ranks use {device} for {count} connections, and it has {_QUEUE_PAIRS} queue pairs",
                "move one of its groups to other Macs, or use backend: jaccl-ring, which needs fewer connections",
            )


def _known_failures(replicas: Sequence[Replica]) -> Iterator[Finding]:
    """Yield replicas that failed with words whose cause is known."""
    for replica in replicas:
        formation = replica.spec.formation
        if formation is None or replica.status is None:
            continue
        for type_, bad in (("EpochOver", ConditionStatus.TRUE), ("Ready", ConditionStatus.FALSE)):
            found = find_condition(replica.status.conditions, type_)
            text = "" if found is None or found.status is not bad else found.message
            known = next((one for one in KNOWN_FAILURES if one.pattern.search(text)), None)
            if known is None:
                continue
            node = _named_node(replica, text)
            yield _finding(
                node,
                f"replica/{replica.name} of shardgroup/{formation.group} failed with {known.name}: {known.cause}",
                known.advice.replace("NODE", node),
                found,
            )
            break


def _named_node(replica: Replica, text: str) -> str:
    """Return the Mac that the message names; else that of rank 0."""
    names = [rank.node for rank in replica.spec.ranks]
    return next((name for name in names if re.search(rf"\b{re.escape(name)}\b", text)), names[0])


def _slow_cables(groups: Sequence[ShardGroup]) -> Iterator[Finding]:
    """Yield groups whose last regular check found a fault."""
    for group in groups:
        conditions = () if group.status is None else group.status.conditions
        found = find_condition(conditions, "FabricHealthy")
        if found is not None and found.status is ConditionStatus.FALSE:
            yield Finding(
                check=_CHECK,
                level="WARN",
                message=f"shardgroup/{group.name}: {found.message}",
                advice=f"`fleetctl describe shardgroup {group.name}` shows since when; `fleetctl fabric bench {group.name}` measures again",
                since=found.last_transition_time,
            )
