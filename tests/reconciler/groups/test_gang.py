"""Groups among other replicas: preemption, reserved room, and the order of priorities."""

from dataclasses import replace

from reconciler.deployments.observe import DeploymentView
from reconciler.deployments.placer import PendingAssignment, Placer, PreemptingAssignment
from reconciler.deployments.plan import plan
from reconciler.placement.inputs import Allocation, NodeView, Rival, request_for
from reconciler.placement.table import NodeTable
from tests.support.reconciler_world import group, mac, seen, sharded, short
from tests.support.world import GIB

A, B = mac("a"), mac("b")
PAIR, SMALLER = group("ab"), group("ab", fallbacks=[{"model": "qwen-4bit"}])


def tenant(name: str, size_gib: float, *nodes: str, priority: int = 0) -> Allocation:
    return Allocation(
        replica=name,
        deployment=name.rpartition("-")[0],
        bytes=int(size_gib * GIB),
        priority=priority,
        version=3,
        nodes=nodes,
    )


def crowded(view: NodeView, *allocations: Allocation) -> NodeView:
    return replace(
        view,
        allocations=allocations,
        used_bytes=sum(allocation.bytes for allocation in allocations),
    )


def test_a_whole_group_preempts_each_victim_once() -> None:
    both = tenant("low-0", 4, "a", "b")
    nodes = [crowded(A, both), crowded(B, both, tenant("tiny-0", 0.1))]
    decided = plan(seen(sharded(priority=10), nodes=nodes, groups=[PAIR]))
    assert [short(action) for action in decided.actions] == ["!low-0 for qwen-0"]
    assert decided.unschedulable is not None
    assert decided.unschedulable.note == "preempts low-0, which frees 4.0 GiB"


def test_the_room_that_a_group_waits_for_is_reserved() -> None:
    ends = tenant("low-0", 4)._replace(is_ending=True)
    placer = Placer(NodeTable([crowded(A, ends), B]), [SMALLER])
    outcome = placer.claim(request_for(sharded()))
    assert isinstance(outcome, PendingAssignment)
    assert [rank.node for rank in outcome.ranks] == ["a", "b"]
    assert outcome.why.note.startswith("waits until low-0 has ended")
    assert placer.assumed.promised.tolist() == [rank.memory.total_bytes for rank in outcome.ranks]


def test_preempting_one_rank_ends_all_ranks() -> None:
    spread = tenant("low-0", 6, "a", "b")
    placer = Placer(NodeTable([crowded(A, spread), crowded(B, spread)]))
    outcome = placer.claim(request_for(sharded("Never", priority=10, memory="6Gi")))
    assert isinstance(outcome, PreemptingAssignment)
    assert placer.assumed.ending.tolist() == [6 * GIB, 6 * GIB]


def test_a_rival_that_is_split_chooses_first() -> None:
    other = replace(request_for(sharded(priority=5)), name="rival")
    situation: DeploymentView = seen(sharded("Never", memory="6Gi"), nodes=[A, B], groups=[PAIR])
    decided = plan(replace(situation, rivals=(Rival(request=other, missing=1),)))
    assert decided.actions == ()
