"""Explains a placement node by node: whether each node fits or why not, its memory and its scores. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from reconciler.deployments.placer import Assignment, PlacementOutcome
from reconciler.groups.formation import check_member
from reconciler.groups.group_view import GroupView
from reconciler.placement import refusals, scores
from reconciler.placement.filters import find_rejection
from reconciler.placement.inputs import NodeView, PlacementRequest, Rejection
from reconciler.placement.memory_proof import describe_concurrency, proof_of
from reconciler.placement.refusals import Unschedulable
from reconciler.placement.scores import ScorePart, SpreadCounts
from schemas.replica import MemoryProof


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeExplanation:
    """One node, evaluated for one more replica."""

    node: str
    refusal: Rejection | None = None
    """Reason why it cannot take the replica; None if it can."""
    memory: MemoryProof | None = None
    """Memory that the replica needs on it."""
    concurrency_note: str = ""
    """The figures that give the number of `concurrency: Auto`."""
    room_bytes: int = 0
    """Memory that may be assigned on it."""
    missing_bytes: int = 0
    """Bytes of the model that it would fetch first."""
    is_preferred: bool = False
    """True if it qualifies for the model's size tier; other nodes are used only if none does."""
    score: float = 0.0
    parts: tuple[ScorePart, ...] = ()

    @property
    def fits(self) -> bool:
        return self.refusal is None


def explain_nodes(
    request: PlacementRequest, nodes: Sequence[NodeView]
) -> tuple[NodeExplanation, ...]:
    """Explain every node: those that fit, the best first, then the others by name.

    The first is the node that `Placer.place` assigns.
    """
    spread = scores.count_spread(request, nodes)
    explanations = [_explain_node(request, node, spread) for node in nodes]
    return tuple(
        sorted(
            explanations,
            key=lambda explanation: (
                not explanation.fits,
                not explanation.is_preferred,
                -explanation.score,
                explanation.node,
            ),
        )
    )


def _explain_node(
    request: PlacementRequest, node: NodeView, spread: SpreadCounts
) -> NodeExplanation:
    refusal = find_rejection(request, node)
    if refusal is not None:
        return NodeExplanation(node=node.name, refusal=refusal, room_bytes=node.room_bytes)
    parts = scores.score_parts(request, node, spread)
    proof = proof_of(request, node)
    return NodeExplanation(
        node=node.name,
        memory=proof,
        concurrency_note=describe_concurrency(request, node, proof),
        room_bytes=node.room_bytes,
        missing_bytes=node.missing_bytes(request.path),
        is_preferred=scores.is_preferred(request, node),
        score=scores.total(parts),
        parts=parts,
    )


def summarize(explanations: Iterable[NodeExplanation]) -> Unschedulable:
    """Count the rejections among the explanations by reason, for `refusals.summary_line`."""
    node_explanations = list(explanations)
    refused = [
        (explanation.node, explanation.refusal)
        for explanation in node_explanations
        if explanation.refusal is not None
    ]
    counted = Counter(why for _, why in refused)
    return Unschedulable(
        nodes=len(node_explanations),
        tallies=tuple(sorted(refusals.count_refusals(counted.items()), key=refusals.sort_key)),
        refusals=tuple(sorted(refused, key=lambda pair: pair[0])[: refusals.MAX_LISTED]),
        fitting=len(node_explanations) - len(refused),
    )


def group_name_of(outcome: PlacementOutcome) -> str:
    """Return the group that an outcome is about; empty for a replica on a single Mac."""
    if isinstance(outcome, Assignment):
        return outcome.form.group if outcome.form is not None else ""
    return outcome.group if isinstance(outcome, Unschedulable) else outcome.why.group


def explain_group_members(
    request: PlacementRequest,
    nodes: Sequence[NodeView],
    group: GroupView,
    outcome: PlacementOutcome,
) -> tuple[NodeExplanation, ...]:
    """Explain every node: those with a rank in rank order, other members that fit, then the others by name."""
    ranks = {} if isinstance(outcome, Unschedulable) else {r.node: r for r in outcome.ranks}
    order = {name: at for at, name in enumerate(ranks)}
    refused: dict[str, Rejection] = {}
    if isinstance(outcome, Unschedulable):
        refused = dict(outcome.refusals)
    node_explanations: list[NodeExplanation] = []
    for node in nodes:
        why = refused.get(node.name)
        if node.name not in group.members:
            message = f"it is not a member of the ShardGroup {group.name}"
            why = Rejection(reason="NotInGroup", message=message)
        elif why is None and node.name not in ranks:
            why = check_member(request, node)
        if why is not None:
            node_explanations.append(
                NodeExplanation(node=node.name, refusal=why, room_bytes=node.room_bytes)
            )
            continue
        rank = ranks.get(node.name)
        # A rank of a fallback may run where the deployment's own model is missing.
        parts = (
            () if check_member(request, node) is not None else scores.score_parts(request, node, {})
        )
        node_explanations.append(
            NodeExplanation(
                node=node.name,
                memory=rank.memory if rank is not None else None,
                room_bytes=node.room_bytes,
                missing_bytes=node.missing_bytes(request.path),
                is_preferred=scores.is_preferred(request, node),
                score=scores.total(parts),
                parts=parts,
            )
        )
    last = len(order)
    return tuple(
        sorted(node_explanations, key=lambda o: (not o.fits, order.get(o.node, last), o.node))
    )
