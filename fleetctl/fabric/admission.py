"""ShardGroups with their Macs: reads them from the store, assigns seats, and checks whether a group can form."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from fleetctl.cli.connect import open_store
from fleetctl.cli.errors import FleetctlError
from fleetctl.objects import reader
from fleetctl.objects.kind_args import kind_of, parse_names
from insight.doctor.group_admission import rank_nodes
from reconciler.groups.fabric import FabricFault, assign_seats
from schemas.deployment import ModelDeployment
from schemas.formation import Seat
from schemas.node import Node
from schemas.shardgroup import ShardGroup, ShardGroupSpec
from store import objects
from store.port import Transport


async def read_group(transport: Transport, name: str) -> ShardGroup:
    """Return the ShardGroup. Raises FleetctlError if it does not exist."""
    (shard_group,) = await reader.read(transport, kind_of("shardgroups"), [name])
    assert isinstance(shard_group, ShardGroup)
    return shard_group


async def read_nodes(transport: Transport) -> list[Node]:
    """Return all nodes with the status that their agents report."""
    api_objects = await reader.read(transport, kind_of("nodes"), [])
    return [node for node in api_objects if isinstance(node, Node)]


def declared_seats(spec: ShardGroupSpec) -> tuple[Seat, ...] | None:
    """Return the seats if the group itself declares all addresses and devices; else None."""
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


def find_seats(
    group: ShardGroup, nodes: Sequence[Node], ready: Collection[str]
) -> tuple[Seat, ...]:
    """Return the seats, with addresses and devices from the agents' reports.

    Raises:
        FleetctlError: a Mac, a cable or a setting is missing; the message names it.

    """
    label, reported = f"shardgroup/{group.name}", {node.name: node.status for node in nodes}
    names = rank_nodes(group.spec, nodes, ready)
    if len(names) < group.spec.wanted_size:
        raise FleetctlError(
            f"{label} needs {group.spec.wanted_size} Macs, but its selector matches {len(names)}"
        )
    statuses = []
    for name in names:
        status = reported.get(name)
        if status is None:
            raise FleetctlError(
                f"{label}: the agent of {name} has never reported; start it, or remove {name} from the group"
            )
        statuses.append((name, status))
    seats = assign_seats(group.spec, statuses)
    if isinstance(seats, FabricFault):
        raise FleetctlError(f"{label}: {seats.message}")
    return seats


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricState:
    """ShardGroups and nodes, as read from the store."""

    groups: tuple[ShardGroup, ...]
    nodes: tuple[Node, ...]
    ready: frozenset[str]
    """Nodes whose agents hold their lease."""
    deployments: tuple[ModelDeployment, ...] = ()


async def read_fabric(words: Sequence[str], options: dict[str, Any]) -> FabricState:
    """Read the named groups, or all, and all nodes and deployments.

    Raises:
        FleetctlError: a group does not exist; the message names the nearest.

    """
    names = tuple(_group_names(words))
    async with open_store(options) as transport:
        api_objects = await reader.read(transport, kind_of("shardgroups"), names)
        return FabricState(
            groups=tuple(
                api_object for api_object in api_objects if isinstance(api_object, ShardGroup)
            ),
            nodes=tuple(await read_nodes(transport)),
            ready=await reader.ready_nodes(transport),
            deployments=tuple(await objects.list_all(transport, ModelDeployment)),
        )


def _group_names(words: Sequence[str]) -> list[str]:
    """Return the names in `studio`, `shardgroup/studio` or `sg studio`. Raises as `kind_args.parse_names`."""
    return parse_names(words, kind_of("shardgroups")) if words else []


async def select_group(transport: Transport, word: str | None) -> ShardGroup:
    """Return the named group; without a name, the only group that exists.

    Raises:
        FleetctlError: the group does not exist, or there are several.

    """
    names = _group_names((word,)) if word is not None else ()
    api_objects = await reader.read(transport, kind_of("shardgroups"), names)
    if len(api_objects) != 1:
        known = ", ".join(group.name for group in api_objects)
        raise FleetctlError(
            f"give the group's name; there are {known}"
            if api_objects
            else "there is no ShardGroup; create one, or use --local"
        )
    (group,) = api_objects
    assert isinstance(group, ShardGroup)
    return group
