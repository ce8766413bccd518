"""What placement thinks of every node for a replica that a group is to run, as data: who has which rank, and why not. Pure."""

from collections.abc import Sequence

from reconciler.groups.form import judge
from reconciler.groups.view import GroupView
from reconciler.observe import NodeView
from reconciler.placement import scores
from reconciler.placement.explain import NodeExplanation
from reconciler.placement.place import Outcome, Placed
from reconciler.placement.refusals import Unschedulable
from reconciler.placement.rejected import Rejected
from reconciler.placement.want import Want


def group_of(outcome: Outcome) -> str:
    """Return the group that a verdict is about; empty for a replica that has one Mac."""
    if isinstance(outcome, Placed):
        return outcome.form.group if outcome.form is not None else ""
    return outcome.group if isinstance(outcome, Unschedulable) else outcome.why.group


def explain(
    want: Want, nodes: Sequence[NodeView], group: GroupView, outcome: Outcome
) -> tuple[NodeExplanation, ...]:
    """Return every node: those with a rank in their order, other members that would do, then the others by name."""
    ranks = {} if isinstance(outcome, Unschedulable) else {r.node: r for r in outcome.ranks}
    order = {name: at for at, name in enumerate(ranks)}
    refused: dict[str, Rejected] = {}
    if isinstance(outcome, Unschedulable):
        refused = dict(outcome.refusals)
    found: list[NodeExplanation] = []
    for node in nodes:
        why = refused.get(node.name)
        if node.name not in group.members:
            message = f"it is no member of the ShardGroup {group.name}"
            why = Rejected(reason="NotInGroup", message=message)
        elif why is None and node.name not in ranks:
            why = judge(want, node)
        if why is not None:
            found.append(NodeExplanation(node=node.name, refusal=why, room_bytes=node.room_bytes))
            continue
        rank = ranks.get(node.name)
        # A rank of a fallback's model may be where the deployment's own is not.
        parts = () if judge(want, node) is not None else scores.parts_of(want, node, {})
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
