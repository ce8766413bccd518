"""Which Macs of a group a replica is split over, and how: members, mode, split, and a memory proof for each rank. Pure.

All ranks or none. What cannot be is told for every member, and for the group where it is about all of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from reconciler.groups import fabric, model_split
from reconciler.groups.group_view import GroupForm, GroupShape, GroupView, with_shape
from reconciler.groups.model_split import RankLoad, deal_layers, layer_spans, prove_rank
from reconciler.placement import filters, scores
from reconciler.placement.inputs import PlacementRequest, Rejection
from reconciler.views import NodeView
from schemas import quantity
from schemas.replica import MemoryProof, RankAssignment
from schemas.shardgroup import Parallelism

Room: TypeAlias = Callable[[NodeView], int]
"""How many bytes there are on a node."""

# What keeps a Mac out of a group though it is in it: elsewhere only what is new is kept away.
_SERIOUS: Final = ("NeedsReboot", "DuplicateHardware")


@dataclass(frozen=True, slots=True, kw_only=True)
class FormedGroup:
    """A rank for each of the Macs, and how they work together."""

    ranks: tuple[RankAssignment, ...]
    form: GroupForm


@dataclass(frozen=True, slots=True, kw_only=True)
class FormationRefusal:
    """Why there is no such replica."""

    members: int
    size: int
    """How many were needed."""
    nodes: tuple[tuple[str, Rejection], ...] = ()
    """What keeps members out, one by one, in their order."""
    whole: Rejection | None = None
    """What is wrong about all of them together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormationAttempt:
    """What is tried, and where."""

    want: PlacementRequest
    """With the shape's model."""
    group: GroupView
    shape: GroupShape
    nodes: Mapping[str, NodeView]
    """The group's members as they are now; one that nobody knows is missing."""
    room: Room
    current: AbstractSet[str] = frozenset()
    """Nodes on which the replica is already: cordons and the like do not drive it off them."""


def form_group(stage: FormationAttempt) -> FormedGroup | FormationRefusal:
    """Return how one replica runs on the group in one shape, or why not."""
    stage = replace(stage, want=with_shape(stage.want, stage.shape))
    healthy, refused = _sorted_out(stage)
    if len(healthy) < stage.shape.size:
        return _unformed(stage, refused)
    geometry = filters.geometry_of(stage.want, healthy[0])
    told: FormationRefusal | None = None
    for way in _ways(stage):
        complaint = model_split.unsupported_reason(geometry, way, stage.shape.size)
        if complaint:
            reason = "ModelNotInspected" if geometry.splitting is None else f"{way}Impossible"
            found: FormedGroup | FormationRefusal = _unformed(
                stage, refused, whole=Rejection(reason=reason, message=complaint)
            )
        elif way == "Tensor":
            found = _tensor(stage, healthy, refused)
        else:
            found = _pipeline(stage, healthy, refused)
        if isinstance(found, FormedGroup):
            return found
        told = told or found
    assert told is not None  # there is always a way to try
    return told


def _ways(stage: FormationAttempt) -> tuple[Parallelism, ...]:
    match stage.shape.parallelism:
        case "Tensor":
            return ("Tensor",)
        case "Pipeline":
            return ("Pipeline",)
        case _:
            return ("Tensor", "Pipeline")


def _sorted_out(stage: FormationAttempt) -> tuple[list[NodeView], list[tuple[str, Rejection]]]:
    """Return the members that could have a rank if there is room, the best first, and why others cannot."""
    healthy: list[NodeView] = []
    refused: list[tuple[str, Rejection]] = []
    for name in stage.group.members:
        node = stage.nodes.get(name)
        if node is None:
            no_such = Rejection(reason="UnknownNode", message="no node of that name has joined")
            refused.append((name, no_such))
            continue
        why = check_member(stage.want, _as_it_is(node) if name in stage.current else node)
        why = why or _unable(stage, name)
        if why is None:
            healthy.append(node)
        else:
            refused.append((name, why))
    if not stage.group.spec.members:
        healthy.sort(key=lambda node: _rank_of(stage, node))
    return healthy, refused


def _unable(stage: FormationAttempt, name: str) -> Rejection | None:
    """Return why a Mac can do no RDMA whatever its cables, so that a spare takes its place."""
    if stage.group.spec.backend == "ring":
        return None
    missing = next(fabric.rdma_faults(name, stage.group.machines[name]), None)
    if missing is None:
        return None
    return Rejection(reason=missing.reason, message=missing.message)


def check_member(want: PlacementRequest, node: NodeView) -> Rejection | None:
    """Return what keeps a member out, but for its memory.

    A reservation does not: it keeps away what has one Mac for itself.
    """
    fixed = (one.check for one in filters.FIXED if one.check is not filters.is_not_reserved)
    for check in (*fixed, filters.keeps_apart, filters.is_below_limit):
        why = check(want, node)
        if why is not None:
            return why
    return None


def _as_it_is(node: NodeView) -> NodeView:
    """Return a node as it counts for what it has already: what keeps new replicas away does not matter."""
    holds = tuple(hold for hold in node.holds if hold.reason in _SERIOUS)
    return replace(node, is_cordoned=False, taints=(), holds=holds)


def _rank_of(stage: FormationAttempt, node: NodeView) -> tuple[object, ...]:
    """Return by what the best of a selector's nodes comes first: who has the weights, then as for a single Mac."""
    is_preferred = scores.is_preferred(stage.want, node)
    score = scores.total(scores.score_parts(stage.want, node, {}))
    return node.name not in stage.current, not is_preferred, -score, node.name


def _load(stage: FormationAttempt, node: NodeView) -> RankLoad:
    spec = stage.want.spec
    return RankLoad(
        context_length=spec.context_length,
        concurrency=spec.concurrency,
        extras=filters.extras_of(stage.want, node),
        # What a person says is of the replica; ranks share it evenly.
        override_bytes=-(-stage.want.override_bytes // stage.shape.size),
    )


def _tensor(
    stage: FormationAttempt, healthy: Sequence[NodeView], refused: Sequence[tuple[str, Rejection]]
) -> FormedGroup | FormationRefusal:
    size, short = stage.shape.size, list(refused)
    fitting: list[tuple[NodeView, MemoryProof]] = []
    for node in healthy:
        geometry = filters.geometry_of(stage.want, node)
        proof = prove_rank(geometry, _load(stage, node), size=size, layers=None)
        if proof.total_bytes <= stage.room(node):
            fitting.append((node, proof))
        else:
            short.append((node.name, _too_small(stage, node, proof)))
    if len(fitting) < size:
        return _unformed(stage, short)
    alike = list(_alike(stage, fitting))
    if not alike:
        return _unformed(stage, short, whole=_unlike([node for node, _ in fitting]))
    why: FormationRefusal | None = None
    for chosen in alike:
        proofs = [proof for _, proof in chosen]
        found = _seated(stage, [node for node, _ in chosen], proofs, "Tensor", short)
        if isinstance(found, FormedGroup):
            return found
        why = why or found
    assert why is not None
    return why


def _alike(
    stage: FormationAttempt, fitting: Sequence[tuple[NodeView, MemoryProof]]
) -> Iterator[Sequence[tuple[NodeView, MemoryProof]]]:
    """Yield sets of Macs for Tensor, the first in order first: each does as much as the weakest, so they are equal."""
    size = stage.shape.size
    if stage.group.spec.allow_unequal:
        yield fitting[:size]
        return
    for kind in dict.fromkeys(node.hardware for node, _ in fitting):
        found = [one for one in fitting if one[0].hardware == kind]
        if len(found) >= size:
            yield found[:size]


def _pipeline(
    stage: FormationAttempt, healthy: Sequence[NodeView], refused: Sequence[tuple[str, Rejection]]
) -> FormedGroup | FormationRefusal:
    size, room = stage.shape.size, stage.room
    roomiest = {node.name for node in sorted(healthy, key=lambda node: -room(node))[:size]}
    choices = (healthy[:size], [node for node in healthy if node.name in roomiest])
    why: FormationRefusal | None = None
    for chosen in choices:
        geometry, load = filters.geometry_of(stage.want, chosen[0]), _load(stage, chosen[0])
        rooms = [room(node) for node in chosen]
        layers = deal_layers(geometry, load, rooms, [node.bandwidth_gbps for node in chosen])
        if layers is None:
            why = _unformed(stage, refused, whole=_no_split(stage, chosen, rooms))
            continue
        proofs = [
            prove_rank(geometry, load, size=size, layers=span) for span in layer_spans(layers)
        ]
        found = _seated(stage, chosen, proofs, "Pipeline", refused, layers)
        if isinstance(found, FormedGroup):
            return found
        why = found
    assert why is not None
    return why


def _seated(
    stage: FormationAttempt,
    chosen: Sequence[NodeView],
    proofs: Sequence[MemoryProof],
    way: Parallelism,
    refused: Sequence[tuple[str, Rejection]],
    layers: Sequence[int] = (),
) -> FormedGroup | FormationRefusal:
    """Return the ranks on these Macs, if they have the same model and the cables for it."""
    group, want = stage.group, stage.want
    models = {_fingerprint(want, node) for node in chosen}
    if len(models) > 1:
        names = ", ".join(node.name for node in chosen)
        message = f"{names} have different models at {want.path}; copy one of them to the others"
        return _unformed(stage, refused, whole=Rejection(reason="ModelsDiffer", message=message))
    machines = [(node.name, group.machines[node.name]) for node in chosen]
    seats = fabric.assign_seats(group.spec, machines)
    if isinstance(seats, fabric.FabricFault):
        why = Rejection(reason=seats.reason, message=seats.message)
        return _unformed(stage, refused, whole=why)
    ranks = tuple(
        RankAssignment(
            node=seat.node,
            addresses=seat.addresses,
            rdma=seat.rdma,
            meeting=seat.meeting,
            memory=proof,
            layers=layers[rank] if layers else 0,
        )
        for rank, (seat, proof) in enumerate(zip(seats, proofs, strict=True))
    )
    first = chosen[0]
    made = GroupForm(
        group=group.name,
        backend=group.spec.backend,
        parallelism=way,
        port=group.spec.port,
        environment=tuple(sorted(group.spec.environment.items())),
        fallback=stage.shape.fallback,
        model=want.path,
        fits_single=filters.proof_of(want, first).total_bytes <= stage.room(first),
    )
    return FormedGroup(ranks=ranks, form=made)


def _fingerprint(want: PlacementRequest, node: NodeView) -> tuple[object, ...]:
    geometry = filters.geometry_of(want, node)
    return geometry.model_type, geometry.layers, geometry.weights_bytes, geometry.vocab_size


def _too_small(stage: FormationAttempt, node: NodeView, proof: MemoryProof) -> Rejection:
    need, have = proof.total_bytes, max(0, stage.room(node))
    return Rejection(
        reason="InsufficientMemory",
        message=f"one of {stage.shape.size} Tensor shares needs {quantity.show(need)}, "
        f"has {quantity.show(have)} free of {quantity.show(max(0, node.allocatable_bytes))}",
        need=need,
        have=have,
    )


def _no_split(
    stage: FormationAttempt, chosen: Sequence[NodeView], rooms: Sequence[int]
) -> Rejection:
    """Return why no way to deal out the layers fits: what all of it needs, and what there is."""
    have = sum(max(0, room) for room in rooms)
    need = filters.proof_of(stage.want, chosen[0]).total_bytes
    free = ", ".join(
        f"{node.name} {quantity.show(max(0, room))}"
        for node, room in zip(chosen, rooms, strict=True)
    )
    return Rejection(
        reason="InsufficientMemory",
        message=f"its layers do not fit as a Pipeline: the model needs {quantity.show(need)} in one piece "
        f"and more in {len(chosen)}, free are {free}",
        need=need,
        have=have,
    )


def _unlike(nodes: Sequence[NodeView]) -> Rejection:
    shown = ", ".join(
        f"{node.name} ({node.chip or 'unknown chip'}, {node.gpu_cores} GPU cores, "
        f"{quantity.show(node.memory_bytes)})"
        for node in nodes
    )
    return Rejection(
        reason="UnequalMembers",
        message=f"Tensor wants equal Macs, each does as much as the weakest: {shown}; write "
        "parallelism: Pipeline, or allowUnequal: true",
    )


def _unformed(
    stage: FormationAttempt,
    refused: Sequence[tuple[str, Rejection]],
    *,
    whole: Rejection | None = None,
) -> FormationRefusal:
    order = {name: at for at, name in enumerate(stage.group.members)}
    return FormationRefusal(
        members=len(stage.group.members),
        size=stage.shape.size,
        nodes=tuple(sorted(refused, key=lambda one: order[one[0]])),
        whole=whole,
    )
