"""Which Macs a group has now, and how they reach each other: for verbs that do something with a group."""

from collections.abc import Collection, Sequence

from fleetctl import reader
from fleetctl.errors import FleetctlError
from fleetctl.kinds import kind_of
from reconciler.groups.fabric import Missing, seats
from schemas.formation import Seat
from schemas.node import Node
from schemas.pools import selects
from schemas.shardgroup import ShardGroup, ShardGroupSpec
from store.port import Transport


async def read_group(transport: Transport, name: str) -> ShardGroup:
    """Return the group. Raises FleetctlError: it is not there."""
    (found,) = await reader.read(transport, kind_of("shardgroups"), [name])
    assert isinstance(found, ShardGroup)
    return found


async def read_nodes(transport: Transport) -> list[Node]:
    """Return every node with what its agent reports."""
    found = await reader.read(transport, kind_of("nodes"), [])
    return [node for node in found if isinstance(node, Node)]


def candidates(spec: ShardGroupSpec, nodes: Sequence[Node]) -> list[str]:
    """Return every Mac of the group, spares too, in rank order. Pure."""
    if spec.selector is None:
        return [member.node for member in spec.members]
    return sorted(node.name for node in nodes if selects(spec.selector, node))


def ranks(spec: ShardGroupSpec, nodes: Sequence[Node], ready: Collection[str]) -> tuple[str, ...]:
    """Return the Macs of the group in rank order, those first whose agents are alive. Pure."""
    names = candidates(spec, nodes)
    alive = [name for name in names if name in ready]
    chosen = [*alive, *(name for name in names if name not in ready)][: spec.wanted_size]
    # A spare takes a place, and the others keep their order.
    return tuple(name for name in names if name in chosen)


def declared(spec: ShardGroupSpec) -> tuple[Seat, ...] | None:
    """Return how the ranks reach each other as far as the group itself says it; None if it leaves it to agents. Pure."""
    members = spec.members[: spec.wanted_size]
    if not members or not all(member.addresses for member in members):
        return None
    names = [member.node for member in members]
    if spec.backend != "ring" and not all(member.rdma for member in members):
        return None
    return tuple(
        Seat(
            node=member.node,
            addresses=member.addresses,
            rdma=tuple(member.rdma.get(name, ()) for name in names) if member.rdma else (),
        )
        for member in members
    )


def seated(group: ShardGroup, nodes: Sequence[Node], ready: Collection[str]) -> tuple[Seat, ...]:
    """Return how the ranks reach each other, with what agents report.

    Raises:
        FleetctlError: a Mac, a cable or a setting is missing; it is named.

    """
    label, reported = f"shardgroup/{group.name}", {node.name: node.status for node in nodes}
    names = ranks(group.spec, nodes, ready)
    if len(names) < group.spec.wanted_size:
        raise FleetctlError(
            f"{label} needs {group.spec.wanted_size} Macs, and its selector finds {len(names)}"
        )
    found = []
    for name in names:
        status = reported.get(name)
        if status is None:
            raise FleetctlError(
                f"{label}: no agent of {name} has reported; start it, or take it out"
            )
        found.append((name, status))
    made = seats(group.spec, found)
    if isinstance(made, Missing):
        raise FleetctlError(f"{label}: {made.message}")
    return made
