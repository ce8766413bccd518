"""ShardGroups with their Macs: reads them from the store, assigns seats, and checks whether a group can form."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleetctl.cli.connect import open_store
from fleetctl.cli.errors import FleetctlError
from fleetctl.objects import reader
from fleetctl.objects.kind_args import kind_of, parse_names
from reconciler.groups import fabric
from reconciler.groups.fabric import Cable, FabricFault, assign_seats
from schemas.deployment import ModelDeployment
from schemas.formation import Seat
from schemas.meta import ConditionStatus, find_condition
from schemas.node import Node, NodeStatus
from schemas.pools import selects
from schemas.shardgroup import ShardGroup, ShardGroupSpec
from store import objects
from store.port import Transport


async def read_group(transport: Transport, name: str) -> ShardGroup:
    """Return the ShardGroup. Raises FleetctlError if it does not exist."""
    (found,) = await reader.read(transport, kind_of("shardgroups"), [name])
    assert isinstance(found, ShardGroup)
    return found


async def read_nodes(transport: Transport) -> list[Node]:
    """Return all nodes with the status that their agents report."""
    found = await reader.read(transport, kind_of("nodes"), [])
    return [node for node in found if isinstance(node, Node)]


def member_names(spec: ShardGroupSpec, nodes: Sequence[Node]) -> list[str]:
    """Return all Macs of the group in rank order, including spares."""
    if spec.selector is None:
        return [member.node for member in spec.members]
    return sorted(node.name for node in nodes if selects(spec.selector, node))


def rank_nodes(
    spec: ShardGroupSpec, nodes: Sequence[Node], ready: Collection[str]
) -> tuple[str, ...]:
    """Return the Macs that take the ranks, in rank order; Macs with a live agent are preferred."""
    names = member_names(spec, nodes)
    alive = [name for name in names if name in ready]
    chosen = [*alive, *(name for name in names if name not in ready)][: spec.wanted_size]
    # A spare takes its own place in the order; the order of the others does not change.
    return tuple(name for name in names if name in chosen)


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
        found = await reader.read(transport, kind_of("shardgroups"), names)
        return FabricState(
            groups=tuple(one for one in found if isinstance(one, ShardGroup)),
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
    found = await reader.read(transport, kind_of("shardgroups"), names)
    if len(found) != 1:
        known = ", ".join(group.name for group in found)
        raise FleetctlError(
            f"give the group's name; there are {known}"
            if found
            else "there is no ShardGroup; create one, or use --local"
        )
    (group,) = found
    assert isinstance(group, ShardGroup)
    return group


_FAST_SYNCH = "MLX_METAL_FAST_SYNCH"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionMember:
    """A Mac of a group."""

    node: str
    rank: int | None
    """None for a spare."""
    is_ready: bool
    addresses: tuple[str, ...] = ()
    """Addresses that its rank would listen on; empty if the group is not admitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnplacedDeployment:
    """A deployment that names a group, and has replicas without a place on it."""

    name: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdmission:
    """Result of the admission check of one group."""

    group: str
    spec: ShardGroupSpec
    members: tuple[AdmissionMember, ...]
    cables: tuple[tuple[Cable, ...], ...] = ()
    """Cables that the backend needs, by pair of Macs; empty for a ring."""
    faults: tuple[FabricFault, ...] = ()
    """Reasons against admission."""
    warnings: tuple[str, ...] = ()
    unplaced: tuple[UnplacedDeployment, ...] = ()
    """Deployments that the group cannot run, though its Macs may be admitted."""

    @property
    def is_admitted(self) -> bool:
        """Return whether the group has no faults."""
        return not self.faults


def unplaced_on(
    group: ShardGroup, deployments: Sequence[ModelDeployment]
) -> tuple[UnplacedDeployment, ...]:
    """Return the deployments that name the group, and of whose latest spec Placed is False."""
    found: list[UnplacedDeployment] = []
    for one in deployments:
        if one.spec.sharding != group.name or one.status is None:
            continue
        placed = find_condition(one.status.conditions, "Placed")
        if placed is None or placed.status is not ConditionStatus.FALSE:
            continue
        if placed.observed_generation >= one.metadata.generation:
            found.append(
                UnplacedDeployment(name=one.name, reason=placed.reason, message=placed.message)
            )
    return tuple(found)


def check_admission(
    group: ShardGroup, nodes: Sequence[Node], ready: Collection[str]
) -> GroupAdmission:
    """Check whether the group can form; `ready` are the nodes with a live agent."""
    spec, known = group.spec, {node.name: node for node in nodes}
    chosen = rank_nodes(spec, nodes, ready)
    reported = tuple(
        (name, status)
        for name in chosen
        if (status := known[name].status if name in known else None) is not None
    )
    faults = [*_absent_faults(spec, chosen, known, ready), *_condition_faults(reported)]
    seats: tuple[Seat, ...] = ()
    has_all_reports = len(reported) == spec.wanted_size
    if has_all_reports:
        faults += fabric.find_faults(spec, reported)
        found = fabric.assign_seats(spec, reported)
        seats = () if isinstance(found, FabricFault) else found
    spares = [name for name in member_names(spec, nodes) if name not in chosen]
    return GroupAdmission(
        group=group.name,
        spec=spec,
        members=(*_ranked_members(chosen, seats, ready), *_spare_members(spares, ready)),
        cables=fabric.group_cables(spec, reported)
        if has_all_reports and spec.backend != "ring"
        else (),
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
            message=f"the group needs {spec.wanted_size} Macs, but its selector matches {len(chosen)}; label more Macs, or "
            "reduce the size",
        )
    for name in chosen:
        if name not in known or known[name].status is None:
            yield FabricFault(
                reason="NodeUnknown",
                message=f"the agent of {name} has never reported; start it, or correct spec.members",
            )
        elif name not in ready:
            yield FabricFault(
                reason="NotReady",
                message=f"the agent of {name} does not answer, and the group has no spare",
            )


def _condition_faults(reported: Sequence[tuple[str, NodeStatus]]) -> Iterator[FabricFault]:
    for name, status in reported:
        reboot = find_condition(status.conditions, "NeedsReboot")
        if reboot is not None and reboot.status is ConditionStatus.TRUE:
            yield FabricFault(reason="NeedsReboot", message=f"restart {name}: {reboot.message}")
        healthy = find_condition(status.conditions, "FabricHealthy")
        if healthy is not None and healthy.status is ConditionStatus.FALSE:
            yield FabricFault(
                reason="FabricUnhealthy",
                message=f"{name}, at the last measurement: {healthy.message}",
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
            versions = ", ".join(f"{name} {value or 'none'}" for (name, _), value in pairs)
            yield f"versions of {title} differ ({versions}); ranks with different versions can produce garbage: install one version"
    kinds = {(status.chip, status.memory_bytes) for _, status in reported}
    if len(kinds) > 1 and spec.parallelism != "Pipeline" and not spec.allow_unequal:
        yield (
            "chips or memory differ: with Tensor, the weakest Mac limits the group, so this is refused without "
            "spec.allowUnequal; Pipeline gives each Mac the layers that it can hold"
        )
    if _FAST_SYNCH in spec.environment:
        yield f"{_FAST_SYNCH} is set: it is faster, but can deadlock and block the GPU (mlx#3142, #3830)"
    for name, node in spares:
        if node is None or node.status is None:
            yield f"spare {name}: its agent has never reported"
        elif spec.backend != "ring":
            yield from (
                f"spare {name}: {one.message}" for one in fabric.rdma_faults(name, node.status)
            )
