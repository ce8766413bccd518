"""Which Macs a group has now, and how they reach each other: for verbs that do something with a group.

Groups and nodes as the store has them, for the verbs of `fleetctl fabric`.

Whether a group's Macs would be let work together, and what is wrong if not. Pure.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from fleetctl.cli.connect import open_store
from fleetctl.cli.errors import FleetctlError
from fleetctl.objects import reader
from fleetctl.objects.kind_args import kind_of
from reconciler.groups import fabric
from reconciler.groups.fabric import Cable, FabricFault, assign_seats
from schemas.formation import Seat
from schemas.meta import ConditionStatus, find_condition
from schemas.node import Node, NodeStatus
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


def member_names(spec: ShardGroupSpec, nodes: Sequence[Node]) -> list[str]:
    """Return every Mac of the group, spares too, in rank order. Pure."""
    if spec.selector is None:
        return [member.node for member in spec.members]
    return sorted(node.name for node in nodes if selects(spec.selector, node))


def rank_nodes(
    spec: ShardGroupSpec, nodes: Sequence[Node], ready: Collection[str]
) -> tuple[str, ...]:
    """Return the Macs of the group in rank order, those first whose agents are alive. Pure."""
    names = member_names(spec, nodes)
    alive = [name for name in names if name in ready]
    chosen = [*alive, *(name for name in names if name not in ready)][: spec.wanted_size]
    # A spare takes a place, and the others keep their order.
    return tuple(name for name in names if name in chosen)


def declared_seats(spec: ShardGroupSpec) -> tuple[Seat, ...] | None:
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


def find_seats(
    group: ShardGroup, nodes: Sequence[Node], ready: Collection[str]
) -> tuple[Seat, ...]:
    """Return how the ranks reach each other, with what agents report.

    Raises:
        FleetctlError: a Mac, a cable or a setting is missing; it is named.

    """
    label, reported = f"shardgroup/{group.name}", {node.name: node.status for node in nodes}
    names = rank_nodes(group.spec, nodes, ready)
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
    made = assign_seats(group.spec, found)
    if isinstance(made, FabricFault):
        raise FleetctlError(f"{label}: {made.message}")
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricState:
    """What there is."""

    groups: tuple[ShardGroup, ...]
    nodes: tuple[Node, ...]
    ready: frozenset[str]
    """Nodes whose agents are alive."""


async def read_fabric(words: Sequence[str], options: dict[str, Any]) -> FabricState:
    """Return the groups that the words name, or all, and every node.

    Raises:
        FleetctlError: there is no such group; with the nearest.

    """
    names = tuple(_group_name(word) for word in words)
    async with open_store(options) as transport:
        found = await reader.read(transport, kind_of("shardgroups"), names)
        return FabricState(
            groups=tuple(one for one in found if isinstance(one, ShardGroup)),
            nodes=tuple(await read_nodes(transport)),
            ready=await reader.ready_nodes(transport),
        )


def _group_name(word: str) -> str:
    """Return the name in `studio` or `shardgroup/studio`."""
    kind, slash, name = word.partition("/")
    if not slash:
        return word
    if kind_of(kind).type is not ShardGroup:
        raise click.UsageError(f"{word} is no ShardGroup; write NAME or shardgroup/NAME")
    return name


async def select_group(transport: Transport, word: str | None) -> ShardGroup:
    """Return the group that the word names; the only one there is where it names none.

    Raises:
        FleetctlError: there is no such group, or there are several.

    """
    names = (_group_name(word),) if word is not None else ()
    found = await reader.read(transport, kind_of("shardgroups"), names)
    if len(found) != 1:
        known = ", ".join(group.name for group in found)
        raise FleetctlError(
            f"which group? There are {known}"
            if found
            else "there is no ShardGroup; declare one, or use --local"
        )
    (group,) = found
    assert isinstance(group, ShardGroup)
    return group


_FAST_SYNCH = "MLX_METAL_FAST_SYNCH"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionMember:
    """One Mac of a group."""

    node: str
    rank: int | None
    """None for a spare."""
    is_ready: bool
    addresses: tuple[str, ...] = ()
    """Where its rank would listen; nothing as long as something is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdmission:
    """What is to be said of one group."""

    group: str
    spec: ShardGroupSpec
    members: tuple[AdmissionMember, ...]
    cables: tuple[tuple[Cable, ...], ...] = ()
    """Those that the backend needs, pair by pair; nothing for a ring."""
    faults: tuple[FabricFault, ...] = ()
    """Why it is not admitted."""
    warnings: tuple[str, ...] = ()

    @property
    def is_admitted(self) -> bool:
        return not self.faults


def check_admission(
    group: ShardGroup, nodes: Sequence[Node], ready: Collection[str]
) -> GroupAdmission:
    """Return what is to be said of the group: `ready` are the nodes whose agents are alive."""
    spec, known = group.spec, {node.name: node for node in nodes}
    chosen = rank_nodes(spec, nodes, ready)
    reported = tuple(
        (name, status)
        for name in chosen
        if (status := known[name].status if name in known else None) is not None
    )
    faults = [*_absent_faults(spec, chosen, known, ready), *_condition_faults(reported)]
    seats: tuple[Seat, ...] = ()
    is_whole = len(reported) == spec.wanted_size
    if is_whole:
        faults += fabric.find_faults(spec, reported)
        found = fabric.assign_seats(spec, reported)
        seats = () if isinstance(found, FabricFault) else found
    spares = [name for name in member_names(spec, nodes) if name not in chosen]
    return GroupAdmission(
        group=group.name,
        spec=spec,
        members=(*_ranked_members(chosen, seats, ready), *_spare_members(spares, ready)),
        cables=fabric.group_cables(spec, reported) if is_whole and spec.backend != "ring" else (),
        faults=tuple(faults),
        warnings=tuple(_warnings(spec, reported, [(name, known.get(name)) for name in spares])),
    )


def _ranked_members(
    chosen: Sequence[str], seats: Sequence[Seat], ready: Collection[str]
) -> Iterator[AdmissionMember]:
    addresses = {seat.node: seat.addresses for seat in seats}
    for rank, name in enumerate(chosen):
        own = addresses.get(name, ())
        yield AdmissionMember(node=name, rank=rank, is_ready=name in ready, addresses=own)


def _spare_members(names: Sequence[str], ready: Collection[str]) -> Iterator[AdmissionMember]:
    for name in names:
        yield AdmissionMember(node=name, rank=None, is_ready=name in ready)


def _absent_faults(
    spec: ShardGroupSpec,
    chosen: Sequence[str],
    known: Mapping[str, Node],
    ready: Collection[str],
) -> Iterator[FabricFault]:
    if len(chosen) < spec.wanted_size:
        yield FabricFault(
            reason="TooFewMembers",
            message=f"it needs {spec.wanted_size} Macs, and its selector finds {len(chosen)}; label more, or write "
            "a smaller size",
        )
    for name in chosen:
        if name not in known or known[name].status is None:
            yield FabricFault(
                reason="NodeUnknown",
                message=f"no agent of {name} has ever reported; start one there, or correct spec.members",
            )
        elif name not in ready:
            yield FabricFault(
                reason="NotReady",
                message=f"the agent of {name} does not answer, and there is no spare for it",
            )


def _condition_faults(reported: Sequence[tuple[str, NodeStatus]]) -> Iterator[FabricFault]:
    for name, status in reported:
        reboot = find_condition(status.conditions, "NeedsReboot")
        if reboot is not None and reboot.status is ConditionStatus.TRUE:
            yield FabricFault(reason="NeedsReboot", message=f"restart {name}: {reboot.message}")
        healthy = find_condition(status.conditions, "FabricHealthy")
        if healthy is not None and healthy.status is ConditionStatus.FALSE:
            yield FabricFault(
                reason="FabricUnhealthy", message=f"{name}, measured before: {healthy.message}"
            )


def _warnings(
    spec: ShardGroupSpec,
    reported: Sequence[tuple[str, NodeStatus]],
    spares: Sequence[tuple[str, Node | None]],
) -> Iterator[str]:
    for title, values in (
        ("mlx", [status.mlx_version for _, status in reported]),
        ("mlx-lm", [status.mlx_lm_version for _, status in reported]),
        ("mlx-fleet", [status.agent_version for _, status in reported]),
    ):
        if len(set(values)) > 1:
            pairs = zip(reported, values, strict=True)
            said = ", ".join(f"{name} {value or 'none'}" for (name, _), value in pairs)
            yield f"versions of {title} differ ({said}); ranks that compute differently answer nonsense: install one"
    kinds = {(status.chip, status.memory_bytes) for _, status in reported}
    if len(kinds) > 1 and spec.parallelism != "Pipeline" and not spec.allow_unequal:
        yield (
            "chips or memory differ: Tensor would do as much as the weakest, so it is refused without "
            "spec.allowUnequal; Pipeline gives each what it can take"
        )
    if _FAST_SYNCH in spec.environment:
        yield f"{_FAST_SYNCH} is set: it is faster, and may deadlock and wedge the GPU (mlx#3142, #3830)"
    for name, node in spares:
        if node is None or node.status is None:
            yield f"spare {name}: no agent has ever reported"
        elif spec.backend != "ring":
            yield from (
                f"spare {name}: {one.message}" for one in fabric.rdma_faults(name, node.status)
            )
