"""Whether a group's Macs would be let work together, and what is wrong if not. Pure."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fleetctl import groups
from reconciler.groups import fabric
from reconciler.groups.cables import Cable
from reconciler.groups.missing import Missing
from schemas.formation import Seat
from schemas.meta import Truth, find_condition
from schemas.node import Node, NodeStatus
from schemas.shardgroup import ShardGroup, ShardGroupSpec

_FAST_SYNCH = "MLX_METAL_FAST_SYNCH"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One Mac of a group."""

    node: str
    rank: int | None
    """None for a spare."""
    is_ready: bool
    addresses: tuple[str, ...] = ()
    """Where its rank would listen; nothing as long as something is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is to be said of one group."""

    group: str
    spec: ShardGroupSpec
    members: tuple[Member, ...]
    cables: tuple[tuple[Cable, ...], ...] = ()
    """Those that the backend needs, pair by pair; nothing for a ring."""
    faults: tuple[Missing, ...] = ()
    """Why it is not admitted."""
    warnings: tuple[str, ...] = ()

    @property
    def is_admitted(self) -> bool:
        return not self.faults


def judge(group: ShardGroup, nodes: Sequence[Node], ready: Collection[str]) -> Verdict:
    """Return what is to be said of the group: `ready` are the nodes whose agents are alive."""
    spec, known = group.spec, {node.name: node for node in nodes}
    chosen = groups.ranks(spec, nodes, ready)
    reported = tuple(
        (name, status)
        for name in chosen
        if (status := known[name].status if name in known else None) is not None
    )
    faults = [*_absent(spec, chosen, known, ready), *_conditions(reported)]
    seats: tuple[Seat, ...] = ()
    is_whole = len(reported) == spec.wanted_size
    if is_whole:
        faults += fabric.missing(spec, reported)
        found = fabric.seats(spec, reported)
        seats = () if isinstance(found, Missing) else found
    spares = [name for name in groups.candidates(spec, nodes) if name not in chosen]
    return Verdict(
        group=group.name,
        spec=spec,
        members=(*_members(chosen, seats, ready), *_spares(spares, ready)),
        cables=fabric.links(spec, reported) if is_whole and spec.backend != "ring" else (),
        faults=tuple(faults),
        warnings=tuple(_warnings(spec, reported, [(name, known.get(name)) for name in spares])),
    )


def _members(
    chosen: Sequence[str], seats: Sequence[Seat], ready: Collection[str]
) -> Iterator[Member]:
    addresses = {seat.node: seat.addresses for seat in seats}
    for rank, name in enumerate(chosen):
        own = addresses.get(name, ())
        yield Member(node=name, rank=rank, is_ready=name in ready, addresses=own)


def _spares(names: Sequence[str], ready: Collection[str]) -> Iterator[Member]:
    for name in names:
        yield Member(node=name, rank=None, is_ready=name in ready)


def _absent(
    spec: ShardGroupSpec,
    chosen: Sequence[str],
    known: Mapping[str, Node],
    ready: Collection[str],
) -> Iterator[Missing]:
    if len(chosen) < spec.wanted_size:
        yield Missing(
            reason="TooFewMembers",
            message=f"it needs {spec.wanted_size} Macs, and its selector finds {len(chosen)}; label more, or write "
            "a smaller size",
        )
    for name in chosen:
        if name not in known or known[name].status is None:
            yield Missing(
                reason="NodeUnknown",
                message=f"no agent of {name} has ever reported; start one there, or correct spec.members",
            )
        elif name not in ready:
            yield Missing(
                reason="NotReady",
                message=f"the agent of {name} does not answer, and there is no spare for it",
            )


def _conditions(reported: Sequence[tuple[str, NodeStatus]]) -> Iterator[Missing]:
    for name, status in reported:
        reboot = find_condition(status.conditions, "NeedsReboot")
        if reboot is not None and reboot.status is Truth.TRUE:
            yield Missing(reason="NeedsReboot", message=f"restart {name}: {reboot.message}")
        healthy = find_condition(status.conditions, "FabricHealthy")
        if healthy is not None and healthy.status is Truth.FALSE:
            yield Missing(
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
            yield from (f"spare {name}: {one.message}" for one in fabric.unable(name, node.status))
