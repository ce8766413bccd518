"""Forms a replica on a group: chooses members, parallelism and layer split, with a memory proof for each rank. Pure.

All ranks or none. A failure names the reason of every member, or one reason for the group as a whole.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from models.layer_files import layer_spans
from reconciler.groups import fabric, model_split
from reconciler.groups.group_view import GroupForm, GroupShape, GroupView, with_shape
from reconciler.groups.model_split import RankLoad, deal_layers, prove_rank
from reconciler.placement import filters, memory_proof, scores
from reconciler.placement.inputs import NodeView, PlacementRequest, Rejection
from schemas import quantity
from schemas.quantity import DEFAULT_CONCURRENCY
from schemas.replica import MemoryProof, RankAssignment
from schemas.shardgroup import Parallelism

Room: TypeAlias = Callable[[NodeView], int]
"""Returns the memory of a node that may be assigned, in bytes."""

# Holds that remove a Mac from a running group. Other holds only keep new replicas away.
_SERIOUS: Final = ("NeedsReboot", "DuplicateHardware", "MetalUnavailable")


@dataclass(frozen=True, slots=True, kw_only=True)
class FormedGroup:
    """The ranks of a replica on a group, and how they work together."""

    ranks: tuple[RankAssignment, ...]
    form: GroupForm


@dataclass(frozen=True, slots=True, kw_only=True)
class FormationRefusal:
    """The reasons why a replica cannot be formed in a shape."""

    members: int
    size: int
    """Number of members that are needed."""
    nodes: tuple[tuple[str, Rejection], ...] = ()
    """Rejected members in member order, with their reasons."""
    whole: Rejection | None = None
    """Reason that concerns the group as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormationAttempt:
    """One shape to try on one group."""

    request: PlacementRequest
    """The request with the shape's model."""
    group: GroupView
    shape: GroupShape
    nodes: Mapping[str, NodeView]
    """The group's members with the assumed state; an unknown member is missing."""
    room: Room
    current: AbstractSet[str] = frozenset()
    """Nodes that the replica runs on: cordons and taints do not remove it from them."""


def form_group(attempt: FormationAttempt) -> FormedGroup | FormationRefusal:
    """Form one replica on a group in one shape, or return why that is not possible."""
    attempt = replace(attempt, request=with_shape(attempt.request, attempt.shape))
    healthy, refused = _check_members(attempt)
    if len(healthy) < attempt.shape.size:
        return _refusal(attempt, refused)
    geometry = memory_proof.geometry_of(attempt.request, healthy[0])
    refusals: list[FormationRefusal] = []
    impossible: list[FormationRefusal] = []
    for way in _ways(attempt):
        unsupported = model_split.unsupported_reason(geometry, way, attempt.shape.size)
        if unsupported:
            reason = "ModelNotInspected" if geometry.splitting is None else f"{way}Impossible"
            why = Rejection(reason=reason, message=unsupported)
            impossible.append(_refusal(attempt, refused, whole=why))
            continue
        formed_group: FormedGroup | FormationRefusal
        if way == "Tensor":
            formed_group = _form_tensor(attempt, healthy, refused)
        else:
            formed_group = _form_pipeline(attempt, healthy, refused)
        if isinstance(formed_group, FormedGroup):
            return formed_group
        refusals.append(formed_group)
    # What the model supports comes first: only that can be cured by other Macs. Every shape has a parallelism.
    return (*refusals, *impossible)[0]


def _ways(attempt: FormationAttempt) -> tuple[Parallelism, ...]:
    match attempt.shape.parallelism:
        case "Tensor":
            return ("Tensor",)
        case "Pipeline":
            return ("Pipeline",)
        case _:
            return ("Tensor", "Pipeline")


def _check_members(attempt: FormationAttempt) -> tuple[list[NodeView], list[tuple[str, Rejection]]]:
    """Return the members that can have a rank if they have room, the best first, and the rejected others."""
    healthy: list[NodeView] = []
    refused: list[tuple[str, Rejection]] = []
    for name in attempt.group.members:
        node = attempt.nodes.get(name)
        if node is None:
            unknown = Rejection(reason="UnknownNode", message="no node of that name has joined")
            refused.append((name, unknown))
            continue
        why = check_member(
            attempt.request, _without_soft_holds(node) if name in attempt.current else node
        )
        why = why or _rdma_rejection(attempt, name)
        if why is None:
            healthy.append(node)
        else:
            refused.append((name, why))
    if not attempt.group.spec.members:
        healthy.sort(key=lambda node: _rank_of(attempt, node))
    return healthy, refused


def _rdma_rejection(attempt: FormationAttempt, name: str) -> Rejection | None:
    """Return why a Mac cannot do RDMA with any cable, so that a spare replaces it."""
    if attempt.group.spec.backend == "ring":
        return None
    missing = next(fabric.rdma_faults(name, attempt.group.machines[name]), None)
    if missing is None:
        return None
    return Rejection(reason=missing.reason, message=missing.message)


def check_member(request: PlacementRequest, node: NodeView) -> Rejection | None:
    """Return the reason that excludes a member, except for its memory.

    A reservation does not exclude it: reservations keep away single-Mac replicas.
    """
    fixed = (rule.check for rule in filters.FIXED if rule.check is not filters.is_not_reserved)
    for check in (*fixed, filters.keeps_apart, filters.is_below_limit):
        why = check(request, node)
        if why is not None:
            return why
    return None


def _without_soft_holds(node: NodeView) -> NodeView:
    """Return a node without cordon, taints and holds that concern only new replicas."""
    holds = tuple(hold for hold in node.holds if hold.reason in _SERIOUS)
    return replace(node, is_cordoned=False, taints=(), holds=holds)


def _rank_of(attempt: FormationAttempt, node: NodeView) -> tuple[object, ...]:
    """Return the sort key of a selected node: present nodes of the replica first, then as for a single Mac."""
    is_preferred = scores.is_preferred(attempt.request, node)
    score = scores.total(scores.score_parts(attempt.request, node, {}))
    return node.name not in attempt.current, not is_preferred, -score, node.name


def _load(attempt: FormationAttempt, node: NodeView) -> RankLoad:
    spec = attempt.request.spec
    return RankLoad(
        context_length=spec.context_length,
        # A group has no speed of its own that could be computed: its links decide.
        concurrency=DEFAULT_CONCURRENCY if spec.concurrency == "Auto" else spec.concurrency,
        extras=memory_proof.extras_of(attempt.request, node),
        # spec.resources.memory is for the whole replica; ranks share it evenly.
        override_bytes=-(-attempt.request.override_bytes // attempt.shape.size),
    )


def _form_tensor(
    attempt: FormationAttempt, healthy: Sequence[NodeView], refused: Sequence[tuple[str, Rejection]]
) -> FormedGroup | FormationRefusal:
    size, short = attempt.shape.size, list(refused)
    fitting: list[tuple[NodeView, MemoryProof]] = []
    for node in healthy:
        geometry = memory_proof.geometry_of(attempt.request, node)
        proof = prove_rank(geometry, _load(attempt, node), size=size, layers=None)
        if proof.total_bytes <= attempt.room(node):
            fitting.append((node, proof))
        else:
            short.append((node.name, _too_small(attempt, node, proof)))
    if len(fitting) < size:
        return _refusal(attempt, short)
    alike = list(_equal_sets(attempt, fitting))
    if not alike:
        return _refusal(attempt, short, whole=_unequal_rejection([node for node, _ in fitting]))
    why: FormationRefusal | None = None
    for chosen in alike:
        proofs = [proof for _, proof in chosen]
        formed_group = _assign_ranks(attempt, [node for node, _ in chosen], proofs, "Tensor", short)
        if isinstance(formed_group, FormedGroup):
            return formed_group
        why = why or formed_group
    assert why is not None
    return why


def _equal_sets(
    attempt: FormationAttempt, fitting: Sequence[tuple[NodeView, MemoryProof]]
) -> Iterator[Sequence[tuple[NodeView, MemoryProof]]]:
    """Yield sets of equal Macs for Tensor, in order: each rank does as much as the weakest one."""
    size = attempt.shape.size
    if attempt.group.spec.allow_unequal:
        yield fitting[:size]
        return
    for kind in dict.fromkeys(node.hardware for node, _ in fitting):
        pairs = [pair for pair in fitting if pair[0].hardware == kind]
        if len(pairs) >= size:
            yield pairs[:size]


def _form_pipeline(
    attempt: FormationAttempt, healthy: Sequence[NodeView], refused: Sequence[tuple[str, Rejection]]
) -> FormedGroup | FormationRefusal:
    size, room = attempt.shape.size, attempt.room
    roomiest = {node.name for node in sorted(healthy, key=lambda node: -room(node))[:size]}
    choices = (healthy[:size], [node for node in healthy if node.name in roomiest])
    why: FormationRefusal | None = None
    for chosen in choices:
        geometry, load = (
            memory_proof.geometry_of(attempt.request, chosen[0]),
            _load(attempt, chosen[0]),
        )
        rooms = [room(node) for node in chosen]
        layers = deal_layers(geometry, load, rooms, [node.bandwidth_gbps for node in chosen])
        if layers is None:
            why = _refusal(attempt, refused, whole=_no_split(attempt, chosen, rooms))
            continue
        proofs = [
            prove_rank(geometry, load, size=size, layers=span) for span in layer_spans(layers)
        ]
        formed_group = _assign_ranks(attempt, chosen, proofs, "Pipeline", refused, layers)
        if isinstance(formed_group, FormedGroup):
            return formed_group
        why = formed_group
    assert why is not None
    return why


def _assign_ranks(
    attempt: FormationAttempt,
    chosen: Sequence[NodeView],
    proofs: Sequence[MemoryProof],
    way: Parallelism,
    refused: Sequence[tuple[str, Rejection]],
    layers: Sequence[int] = (),
) -> FormedGroup | FormationRefusal:
    """Return the ranks on these Macs, if they have the same model and the cables for it."""
    group, request = attempt.group, attempt.request
    models = {_fingerprint(request, node) for node in chosen}
    if len(models) > 1:
        names = ", ".join(node.name for node in chosen)
        message = f"{names} have different models at {request.path}; copy one model to all of them"
        return _refusal(attempt, refused, whole=Rejection(reason="ModelsDiffer", message=message))
    machines = [(node.name, group.machines[node.name]) for node in chosen]
    seats = fabric.assign_seats(group.spec, machines)
    if isinstance(seats, fabric.FabricFault):
        why = Rejection(reason=seats.reason, message=seats.message)
        return _refusal(attempt, refused, whole=why)
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
    form = GroupForm(
        group=group.name,
        backend=group.spec.backend,
        parallelism=way,
        port=group.spec.port,
        environment=tuple(sorted(group.spec.environment.items())),
        fallback=attempt.shape.fallback,
        model=request.path,
        fits_single=memory_proof.proof_of(request, first).total_bytes <= attempt.room(first),
    )
    return FormedGroup(ranks=ranks, form=form)


def _fingerprint(request: PlacementRequest, node: NodeView) -> tuple[object, ...]:
    geometry = memory_proof.geometry_of(request, node)
    return geometry.model_type, geometry.layers, geometry.weights_bytes, geometry.vocab_size


def _too_small(attempt: FormationAttempt, node: NodeView, proof: MemoryProof) -> Rejection:
    need, have = proof.total_bytes, max(0, attempt.room(node))
    return Rejection(
        reason="InsufficientMemory",
        message=f"one of {attempt.shape.size} Tensor shares needs {quantity.show(need)}, "
        f"has {quantity.show(have)} free of {quantity.show(max(0, node.allocatable_bytes))}",
        need=need,
        have=have,
        capacity=node.allocatable_bytes,
    )


def _no_split(
    attempt: FormationAttempt, chosen: Sequence[NodeView], rooms: Sequence[int]
) -> Rejection:
    """Return the reason that no split of the layers fits, with the memory of the model and of the nodes."""
    have = sum(max(0, room) for room in rooms)
    need = memory_proof.proof_of(attempt.request, chosen[0]).total_bytes
    free = ", ".join(
        f"{node.name} {quantity.show(max(0, room))}"
        for node, room in zip(chosen, rooms, strict=True)
    )
    return Rejection(
        reason="InsufficientMemory",
        message=f"its layers do not fit as a Pipeline: the model needs {quantity.show(need)} on one Mac "
        f"and more on {len(chosen)}, free are {free}; add a member and raise size, or lower the deployment's contextLength",
        need=need,
        have=have,
    )


def _unequal_rejection(nodes: Sequence[NodeView]) -> Rejection:
    listed = ", ".join(
        f"{node.name} ({node.chip or 'unknown chip'}, {node.gpu_cores} GPU cores, "
        f"{quantity.show(node.memory_bytes)})"
        for node in nodes
    )
    return Rejection(
        reason="UnequalMembers",
        message=f"Tensor needs equal Macs, because each does as much as the weakest: {listed}; set "
        "parallelism: Pipeline, or allowUnequal: true",
    )


def _refusal(
    attempt: FormationAttempt,
    refused: Sequence[tuple[str, Rejection]],
    *,
    whole: Rejection | None = None,
) -> FormationRefusal:
    order = {name: at for at, name in enumerate(attempt.group.members)}
    return FormationRefusal(
        members=len(attempt.group.members),
        size=attempt.shape.size,
        nodes=tuple(sorted(refused, key=lambda one: order[one[0]])),
        whole=whole,
    )
