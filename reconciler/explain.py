"""What placement thinks of every node, as data: fits or why not, and its score part by part. Pure.

What placement thinks of every node for a replica that a group is to run, as data: who has which rank, and why not. Pure.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from reconciler.groups.formation import check_member
from reconciler.groups.group_view import GroupView
from reconciler.placement import refusals, scores
from reconciler.placement.filters import find_rejection, proof_of
from reconciler.placement.inputs import PlacementRequest, Rejection
from reconciler.placement.refusals import Unschedulable
from reconciler.placement.scores import ScorePart, SpreadCounts
from reconciler.placer import Assignment, PlacementOutcome
from reconciler.views import NodeView
from schemas.replica import MemoryProof


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeExplanation:
    """One node, as seen for one more replica."""

    node: str
    refusal: Rejection | None = None
    """Why it cannot take the replica; None if it can."""
    memory: MemoryProof | None = None
    """What the replica would need there."""
    room_bytes: int = 0
    """What there is."""
    is_preferred: bool = False
    """Whether it is big enough for a model of this size; others are taken for want of better."""
    score: float = 0.0
    parts: tuple[ScorePart, ...] = ()

    @property
    def fits(self) -> bool:
        return self.refusal is None


def explain_nodes(want: PlacementRequest, nodes: Sequence[NodeView]) -> tuple[NodeExplanation, ...]:
    """Return every node: those that fit, the best first; then the others by name.

    The first is where `place` puts the replica.
    """
    crowd = scores.count_spread(want, nodes)
    found = [_explain_node(want, node, crowd) for node in nodes]
    return tuple(
        sorted(found, key=lambda one: (not one.fits, not one.is_preferred, -one.score, one.node))
    )


def _explain_node(want: PlacementRequest, node: NodeView, crowd: SpreadCounts) -> NodeExplanation:
    refusal = find_rejection(want, node)
    if refusal is not None:
        return NodeExplanation(node=node.name, refusal=refusal, room_bytes=node.room_bytes)
    parts = scores.score_parts(want, node, crowd)
    return NodeExplanation(
        node=node.name,
        memory=proof_of(want, node),
        room_bytes=node.room_bytes,
        is_preferred=scores.is_preferred(want, node),
        score=scores.total(parts),
        parts=parts,
    )


def summarize(explanations: Iterable[NodeExplanation]) -> Unschedulable:
    """Return the refusals among the explanations by reason, for `refusals.one_line`."""
    found = list(explanations)
    refused = [(one.node, one.refusal) for one in found if one.refusal is not None]
    counted = Counter(why for _, why in refused)
    return Unschedulable(
        nodes=len(found),
        tallies=tuple(sorted(refusals.count_refusals(counted.items()), key=refusals.sort_key)),
        refusals=tuple(sorted(refused, key=lambda pair: pair[0])[: refusals.MAX_LISTED]),
        fitting=len(found) - len(refused),
    )


def group_name_of(outcome: PlacementOutcome) -> str:
    """Return the group that a verdict is about; empty for a replica that has one Mac."""
    if isinstance(outcome, Assignment):
        return outcome.form.group if outcome.form is not None else ""
    return outcome.group if isinstance(outcome, Unschedulable) else outcome.why.group


def explain_group_members(
    want: PlacementRequest, nodes: Sequence[NodeView], group: GroupView, outcome: PlacementOutcome
) -> tuple[NodeExplanation, ...]:
    """Return every node: those with a rank in their order, other members that would do, then the others by name."""
    ranks = {} if isinstance(outcome, Unschedulable) else {r.node: r for r in outcome.ranks}
    order = {name: at for at, name in enumerate(ranks)}
    refused: dict[str, Rejection] = {}
    if isinstance(outcome, Unschedulable):
        refused = dict(outcome.refusals)
    found: list[NodeExplanation] = []
    for node in nodes:
        why = refused.get(node.name)
        if node.name not in group.members:
            message = f"it is no member of the ShardGroup {group.name}"
            why = Rejection(reason="NotInGroup", message=message)
        elif why is None and node.name not in ranks:
            why = check_member(want, node)
        if why is not None:
            found.append(NodeExplanation(node=node.name, refusal=why, room_bytes=node.room_bytes))
            continue
        rank = ranks.get(node.name)
        # A rank of a fallback's model may be where the deployment's own is not.
        parts = () if check_member(want, node) is not None else scores.score_parts(want, node, {})
        found.append(
            NodeExplanation(
                node=node.name,
                memory=rank.memory if rank is not None else None,
                room_bytes=node.room_bytes,
                is_preferred=scores.is_preferred(want, node),
                score=scores.total(parts),
                parts=parts,
            )
        )
    last = len(order)
    return tuple(sorted(found, key=lambda o: (not o.fits, order.get(o.node, last), o.node)))
