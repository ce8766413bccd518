"""Admission of ShardGroups: whether the Macs of a group can form it now, and what is missing. Pure."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from reconciler.groups import fabric
from reconciler.groups.fabric import Cable, FabricFault
from schemas.deployment import ModelDeployment
from schemas.formation import Seat
from schemas.meta import ConditionStatus, find_condition
from schemas.node import Node, NodeStatus
from schemas.pools import selects
from schemas.shardgroup import ShardGroup, ShardGroupSpec

_FAST_SYNCH = "MLX_METAL_FAST_SYNCH"


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
    unplaced_deployments: list[UnplacedDeployment] = []
    for deployment in deployments:
        if deployment.spec.sharding != group.name or deployment.status is None:
            continue
        placed = find_condition(deployment.status.conditions, "Placed")
        if placed is None or placed.status is not ConditionStatus.FALSE:
            continue
        if placed.observed_generation >= deployment.metadata.generation:
            unplaced_deployments.append(
                UnplacedDeployment(
                    name=deployment.name, reason=placed.reason, message=placed.message
                )
            )
    return tuple(unplaced_deployments)


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
    faults = [*_member_faults(spec, chosen, known, ready)]
    seats: tuple[Seat, ...] = ()
    has_all_reports = len(reported) == spec.wanted_size
    if has_all_reports:
        faults += fabric.find_faults(spec, reported)
        found = fabric.assign_seats(spec, reported)
        seats = () if isinstance(found, FabricFault) else found
    spares = [name for name in member_names(spec, nodes) if name not in chosen]
    addresses = {seat.node: seat.addresses for seat in seats}
    ranks = [*enumerate(chosen), *((None, name) for name in spares)]
    return GroupAdmission(
        group=group.name,
        spec=spec,
        members=tuple(
            AdmissionMember(
                node=name, rank=rank, is_ready=name in ready, addresses=addresses.get(name, ())
            )
            for rank, name in ranks
        ),
        cables=fabric.group_cables(spec, reported)
        if has_all_reports and spec.backend != "ring"
        else (),
        faults=tuple(faults),
        warnings=tuple(_warnings(spec, reported, [(name, known.get(name)) for name in spares])),
    )


def _member_faults(
    spec: ShardGroupSpec,
    chosen: Sequence[str],
    known: Mapping[str, Node],
    ready: Collection[str],
) -> Iterator[FabricFault]:
    """Yield the members that are missing, and those whose conditions keep them from forming the group."""
    if len(chosen) < spec.wanted_size:
        yield FabricFault(
            reason="TooFewMembers",
            message=f"the group needs {spec.wanted_size} Macs, but its selector matches {len(chosen)}; label more Macs, or "
            "reduce the size",
        )
    reported: list[tuple[str, NodeStatus]] = []
    for name in chosen:
        status = known[name].status if name in known else None
        if status is None:
            message = f"the agent of {name} has never reported; start it, or correct spec.members"
            yield FabricFault(reason="NodeUnknown", message=message)
            continue
        reported.append((name, status))
        if name not in ready:
            message = f"the agent of {name} does not answer, and the group has no spare"
            yield FabricFault(reason="NotReady", message=message)
    for name, status in reported:
        reboot = find_condition(status.conditions, "NeedsReboot")
        if reboot is not None and reboot.status is ConditionStatus.TRUE:
            yield FabricFault(reason="NeedsReboot", message=f"restart {name}: {reboot.message}")
        healthy = find_condition(status.conditions, "FabricHealthy")
        if healthy is not None and healthy.status is ConditionStatus.FALSE:
            message = f"{name}, at the last measurement: {healthy.message}"
            yield FabricFault(reason="FabricUnhealthy", message=message)


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
                f"spare {name}: {fault.message}" for fault in fabric.rdma_faults(name, node.status)
            )
