"""Plans for deployments on groups: tables of situations with their messages, and groups among other replicas."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from reconciler.deployments.actions import CreateReplica, ReformReplica
from reconciler.deployments.observe import DeploymentView, ReplicaView
from reconciler.deployments.placer import (
    Assignment,
    PendingAssignment,
    Placer,
    PreemptingAssignment,
)
from reconciler.deployments.plan import plan
from reconciler.groups.epochs import Epoch
from reconciler.groups.group_view import GroupView
from reconciler.placement.inputs import Allocation, NodeView, Rejection, Rival, request_for
from reconciler.placement.memory_proof import describe_proof
from reconciler.placement.refusals import Unschedulable, summary_line
from reconciler.placement.table import NodeTable
from schemas.formation import GoldenAnswer
from schemas.node import Taint
from schemas.shardgroup import Backend
from tests.support.golden_cases import Golden
from tests.support.reconciler_fabric import group as cabled
from tests.support.reconciler_fabric import meshed, with_fabric
from tests.support.reconciler_world import (
    BIG,
    LAYER,
    counted,
    group,
    mac,
    on,
    planned,
    seen,
    sharded,
)
from tests.support.world import GIB, node

A, B, C = mac("a"), mac("b"), mac("c")
AWAY = replace(B, is_ready=False)
QUIET = Rejection(reason="NodeWithheld", message="quiet hours")
REBOOT = Rejection(reason="NeedsReboot", message="a rank does not die")
TAINT = Taint(key="owner", effect="NoSchedule")
OVER = Epoch(over="RankEnded", message="rank 1 on b: it ended with -9")
LOST = Epoch(over="NodeLost", message="b is away", is_lost=True)
STEADY = replace(OVER, is_steady=True)
PAIR, SPARE, TRIO = group("ab"), group("abc", size=2), group("abc")
SMALLER = group("ab", fallbacks=[{"model": "qwen-4bit"}])
BACK = group("abc", fallbacks=[{"size": 2}])

PLACED = [
    pytest.param(PAIR, (A, B, C), "+qwen-0@a,b", id="all-ranks-at-once"),
    pytest.param(group("ba"), (A, B), "+qwen-0@b,a", id="in-rank-order"),
    pytest.param(SPARE, (A, B, C), "+qwen-0@a,b", id="a-spare-waits"),
    pytest.param(SPARE, (A, AWAY, C), "+qwen-0@a,c", id="a-spare-steps-in"),
    pytest.param(SPARE, (A, replace(B, is_cordoned=True), C), "+qwen-0@a,c", id="not-cordoned"),
    pytest.param(SPARE, (A, replace(B, taints=(TAINT,)), C), "+qwen-0@a,c", id="not-tainted"),
    pytest.param(SPARE, (A, replace(B, holds=(QUIET,)), C), "+qwen-0@a,c", id="not-quiet"),
    pytest.param(SPARE, (A, mac("b", 5), C), "+qwen-0@a,c", id="not-full"),
    pytest.param(TRIO, (A, B, C), "+qwen-0@a,b,c", id="three-as-a-pipeline"),
    pytest.param(
        PAIR, (replace(A, reserved_by_group="pair"), replace(B, reserved_by_group="other")), "+qwen-0@a,b",
        id="a-reservation-is-against-single-macs",
    ),
    pytest.param(group("abc", size=2, selector={}), (mac("a", 9), B, C), "+qwen-0@b,c", id="a-selector-takes-the-best-alike"),
    pytest.param(
        group("ab", fallbacks=[{"model": "qwen-4bit"}]), (mac("a", 6), mac("b", 6)), "+qwen-0@a,b",
        id="a-fallback-where-the-group-is-too-small",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("where", "nodes", "wanted"), PLACED)
def test_where_a_replica_goes(where: GroupView, nodes: tuple[NodeView, ...], wanted: str) -> None:
    view = seen(sharded(), nodes=nodes, groups=[where])
    assert planned(view) == [wanted]
    assert plan(view).unschedulable is None


PIPE = group("ab", parallelism="Pipeline")
REFUSED = {
    "memory": (PAIR, (A, mac("b", 5))),
    "away": (PAIR, (A, AWAY)),
    "never there": (PAIR, (A,)),
    "the nearest thing that works": (group("abc", parallelism="Tensor"), (A, B, C)),
    "Auto names the way that the model has": (
        group("abc"),
        (mac("a", 3), mac("b", 3), mac("c", 3)),
    ),
    "unlike": (group("ab", parallelism="Tensor"), (A, replace(B, chip="Apple M1", gpu_cores=8))),
    "no split": (PIPE, (mac("a", 4), mac("b", 9))),
}


def refusal(view: DeploymentView) -> Unschedulable:
    """Return why nothing is done."""
    decided = plan(view)
    assert decided.actions == ()
    assert decided.unschedulable is not None
    return decided.unschedulable


def test_why_it_goes_nowhere(golden: Golden) -> None:
    cases = []
    for case, (where, nodes) in REFUSED.items():
        why = refusal(seen(sharded(), nodes=nodes, groups=[where]))
        cases.append((case, [summary_line(why)]))
    why = refusal(seen(sharded("pear"), nodes=[A, B], groups=[PAIR]))
    failing = on("ab", epoch=replace(OVER, is_given_up=True), failures=2)
    loop = refusal(seen(sharded(), [failing], (A, B), [PAIR]))
    cases += [("no such group", [summary_line(why)]), ("a crash loop", [summary_line(loop)])]
    golden.check("reconciler/group_refusals.txt", {"Why a replica gets no group": cases})
    # A change of the deployment starts it at once.
    changed = sharded(context_length=2048)
    assert "-qwen-0 Outdated" in planned(seen(changed, [failing], (A, B), [PAIR]))


def test_every_member_says_why_it_cannot() -> None:
    for nodes, refused in (
        ([AWAY, mac("a", 5)], [("b", "NodeNotReady")]),
        ([B, mac("a", 5)], [("a", "InsufficientMemory")]),
    ):
        why = refusal(seen(sharded(), nodes=nodes, groups=[PAIR]))
        assert [(name, rejected.reason) for name, rejected in why.refusals] == refused


AUTO = [
    pytest.param((A, B, mac("c", 20)), [PAIR], "+qwen-0@c", id="a-single-mac-that-fits"),
    pytest.param((A, B), [PAIR], "+qwen-0@a,b", id="no-single-mac-ever"),
    pytest.param((A, B, mac("c", 20, is_cordoned=True)), [PAIR], "", id="a-cordon-may-be-over-tomorrow"),
    pytest.param(
        (A, B, C, mac("d")), [group("abcd", name="four"), group("cd", name="two")], "+qwen-0@c,d", id="the-smallest-group",
    ),
    pytest.param(
        (A, B, mac("c", 5), mac("d", 5)), [group("ab", name="two"), group("cd", name="one")], "+qwen-0@a,b",
        id="the-smallest-that-does",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("nodes", "groups", "wanted"), AUTO)
def test_auto(nodes: tuple[NodeView, ...], groups: list[GroupView], wanted: str) -> None:
    view = seen(sharded("Auto"), nodes=nodes, groups=groups)
    assert planned(view) == [wanted] * bool(wanted)


def test_two_replicas_share_a_group_only_where_there_is_memory() -> None:
    wide = [mac("a", 20), mac("b", 20)]
    both = seen(sharded(replicas=2), nodes=wide, groups=[PAIR])
    assert planned(both) == ["+qwen-0@a,b", "+qwen-1@a,b"]
    one = seen(sharded(replicas=2), nodes=[A, B], groups=[PAIR])
    assert planned(one) == ["+qwen-0@a,b"]
    assert plan(one).unschedulable is not None


def test_a_pipeline_deals_layers_by_room() -> None:
    nodes = [mac("a", 12), mac("b", 6)]
    where = group("ab", parallelism="Pipeline")
    (action,) = plan(seen(sharded(), nodes=nodes, groups=[where])).actions
    assert isinstance(action, CreateReplica)
    layers = [rank.layers for rank in action.ranks]
    assert sum(layers) == 16
    assert layers[0] > layers[1] > 0
    assert all(
        rank.memory.total_bytes <= node.allocatable_bytes
        for rank, node in zip(action.ranks, nodes, strict=True)
    )
    assert LAYER * layers[0] <= action.ranks[0].memory.weights_bytes < BIG.weights_bytes
    assert action.form is not None
    assert (action.form.parallelism, action.form.fits_single) == ("Pipeline", False)


AGAIN = [
    pytest.param(PAIR, on("ab"), (A, B), "", id="what-goes-on-goes-on"),
    pytest.param(PAIR, on("ab", epoch=OVER), (A, B), "~qwen-0@a,b", id="the-same-macs"),
    pytest.param(SPARE, on("ab", epoch=LOST), (A, AWAY, C), "~qwen-0@a,c", id="a-spare"),
    pytest.param(SPARE, on("bc", epoch=OVER), (A, B, C), "~qwen-0@a,b", id="rank-order-again"),
    pytest.param(PAIR, on("ab", epoch=LOST), (A, AWAY), "", id="nobody-is-left"),
    pytest.param(BACK, on("abc", epoch=LOST), (mac("a"), AWAY, C), "~qwen-0@a,c/1", id="fewer-macs"),
    pytest.param(
        SPARE, on("ab", epoch=OVER), (A, replace(B, holds=(REBOOT,)), C), "~qwen-0@a,c", id="not-on-what-needs-a-reboot",
    ),
    pytest.param(PAIR, on("ab", epoch=OVER), (A, replace(B, is_cordoned=True)), "~qwen-0@a,b", id="a-cordon-drives-nobody-off"),
    pytest.param(SPARE, on("ab", epoch=OVER), (A, replace(B, is_cordoned=True), C), "~qwen-0@a,c", id="but-a-spare-is-better"),
    pytest.param(PAIR, on("ab", epoch=OVER, failures=1), (A, B), "", id="the-second-waits"),
    pytest.param(PAIR, on("ab", epoch=replace(OVER, over_s=5.0), failures=1), (A, B), "~qwen-0@a,b", id="five-seconds"),
    pytest.param(PAIR, on("ab", epoch=STEADY, failures=5), (A, B), "~qwen-0@a,b", id="it-served-a-minute"),
    pytest.param(
        SMALLER, on("ab", epoch=replace(OVER, over_s=10.0), failures=2), (A, B), "~qwen-0@a,b/1", id="three-failures-fall-back",
    ),
    pytest.param(PAIR, on("ab", epoch=replace(OVER, is_given_up=True), failures=2), (A, B), "", id="given-up"),
    pytest.param(
        PAIR, on("ab", epoch=replace(OVER, is_given_up=True, over_s=300.0), failures=2), (A, B), "~qwen-0@a,b",
        id="given-up-and-tried-again-after-minutes",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("where", "replica", "nodes", "wanted"), AGAIN)
def test_the_next_epoch(
    where: GroupView, replica: ReplicaView, nodes: tuple[NodeView, ...], wanted: str
) -> None:
    assert planned(seen(sharded(), [replica], nodes, [where])) == [wanted] * bool(wanted)


def next_epoch(replica: ReplicaView, nodes: Sequence[NodeView], where: GroupView) -> ReformReplica:
    (action,) = plan(seen(sharded(), [replica], nodes, [where])).actions
    assert isinstance(action, ReformReplica)
    return action


def test_the_next_epoch_keeps_leaving_ranks() -> None:
    """On a live Mac the old rank may still run; an absent Mac comes back without it."""
    replica = on("ab", epoch=replace(OVER, is_steady=True))
    action = next_epoch(replica, (A, replace(B, holds=(REBOOT,)), C), SPARE)
    # On a the next rank is smaller than the one before.
    assert [(rank.node, rank.rank) for rank in action.leaving] == [("a", 0), ("b", 1)]
    assert {rank.memory_bytes for rank in action.leaving} == {9 * GIB}
    assert (action.failures, action.because) == (1, OVER.message)
    away = replace(on("ab", epoch=LOST), away_nodes=frozenset({"b"}))
    action = next_epoch(away, (A, AWAY, C), SPARE)
    assert [rank.node for rank in action.leaving] == ["a"]


def test_leaving_ranks_count_until_they_have_ended() -> None:
    replica = on("ab", epoch=replace(OVER, is_steady=True))
    nodes = (A, replace(B, holds=(REBOOT,)), C)
    placer = Placer(NodeTable(seen(sharded(), [replica], nodes, [SPARE]).table.nodes), [SPARE])
    found = placer.reform(request_for(sharded()), replica.replica, STEADY)
    assert isinstance(found, Assignment)
    free = placer.assumed.free.tolist()
    assert free[:2] == [GIB, GIB]
    assert free[2] == 10 * GIB - found.ranks[1].memory.total_bytes


def test_the_answer_goes_with_the_model() -> None:
    golden = GoldenAnswer(pieces=("a",), logprobs=(-0.5,))
    over = replace(OVER, golden=golden, over_s=10.0)
    assert next_epoch(on("ab", epoch=over), (A, B), SMALLER).form.golden == golden
    other = next_epoch(on("ab", epoch=over, failures=2), (A, B), SMALLER)
    assert (other.form.model, other.form.golden) == ("qwen-4bit", None)
    serving = on("ab", epoch=Epoch(is_steady=True, golden=golden))
    wide = (mac("a", 20), mac("b", 20))
    (new,) = plan(seen(sharded(replicas=2), [serving], wide, [PAIR])).actions
    assert isinstance(new, CreateReplica)
    assert new.form is not None
    assert new.form.golden == golden


def test_auto_tries_another_group() -> None:
    auto = sharded("Auto")
    groups = [PAIR, group("cd", name="second")]
    view = seen(auto, [on("ab", of=auto, epoch=LOST)], (A, AWAY, C, mac("d")), groups)
    assert planned(view) == ["-qwen-0 GroupLost"]


DRAINED = mac("b", leave_reason="draining", holds=(Rejection(reason="NodeDraining", message="so"),))
TAINTED = mac("b", taints=(Taint(key="owner", effect="NoExecute"),))


@pytest.mark.parametrize(
    ("where", "nodes", "wanted"),
    [
        pytest.param(
            SPARE, (mac("a", 20), DRAINED, mac("c", 20)), "+qwen-1@a,c", id="another-first"
        ),
        pytest.param(PAIR, (mac("a", 20), DRAINED), "-qwen-0 Evicted", id="else-it-ends"),
        pytest.param(PAIR, (A, TAINTED), "-qwen-0 Evicted", id="a-taint-evicts-all-of-it"),
    ],
)
def test_any_rank_on_a_node_that_it_must_leave_counts(
    where: GroupView, nodes: tuple[NodeView, ...], wanted: str
) -> None:
    assert planned(seen(sharded(), [on("ab")], nodes, [where])) == [wanted]


def test_a_new_version_takes_the_place_of_the_old_one() -> None:
    """A group has no memory for two: the old one ends first, if the new one fits then."""
    changed = sharded(context_length=2048)
    assert planned(seen(changed, [on("ab")], (A, B), [PAIR])) == ["-qwen-0 OutdatedInPlace"]
    long = sharded(context_length=8192)
    assert planned(seen(long, [on("ab")], (mac("a", 9), mac("b", 9)), [PAIR])) != []
    much, narrow = sharded(context_length=8192, concurrency=16), (mac("a", 7.9), mac("b", 7.9))
    decided = plan(seen(much, [on("ab", share_gib=7)], narrow, [PAIR]))
    assert decided.actions == ()
    assert decided.stuck is not None


def test_actions_name_every_rank() -> None:
    (action,) = plan(seen(sharded(), nodes=[A, B], groups=[PAIR])).actions
    assert isinstance(action, CreateReplica)
    assert [rank.addresses for rank in action.ranks] == [("169.254.0.97",), ("169.254.0.98",)]
    assert action.form is not None
    form = action.form
    assert (form.group, form.backend, form.parallelism) == ("pair", "ring", "Tensor")


def test_the_proof_of_a_rank_names_the_default_of_groups() -> None:
    asked = sharded(concurrency="Auto")
    (action,) = plan(seen(asked, nodes=[A, B], groups=[PAIR])).actions
    assert isinstance(action, CreateReplica)
    text = describe_proof(action.ranks[0].memory, asked.spec)
    assert "for 4 x 1024 tokens, requests by the default for shard groups, " in text


def test_counting_counts_each_rank() -> None:
    situation = counted(seen(sharded(), [on("ab")], [A, B, node("c")]))
    assert [view.used_bytes for view in situation.table.nodes] == [9 * GIB, 9 * GIB, 0]


NAMES = ("mac-0", "mac-1", "mac-2")


def three(backend: Backend, *, off: tuple[int, ...]) -> GroupView:
    """Return a group of two of three Macs, RDMA switched off on some."""
    macs = meshed(3)
    for at in off:
        macs = with_fabric(macs, at, is_rdma_enabled=False)
    spec = cabled(backend, macs).model_copy(update={"size": 2})
    return GroupView(name="pair", spec=spec, members=NAMES, machines=dict(macs))


@pytest.mark.parametrize(
    ("backend", "off", "taken"),
    [
        pytest.param("jaccl", (), "+qwen-0@mac-0,mac-1", id="all-can"),
        pytest.param("jaccl", (0,), "+qwen-0@mac-1,mac-2", id="a-spare-steps-in"),
        pytest.param("ring", (0, 1, 2), "+qwen-0@mac-0,mac-1", id="a-ring-needs-none"),
    ],
)
def test_healthy_members_are_chosen(backend: Backend, off: tuple[int, ...], taken: str) -> None:
    view = seen(sharded(), (), [mac(n) for n in NAMES], [three(backend, off=off)])
    assert planned(view) == [taken]


def test_a_refusal_names_each_mac() -> None:
    view = seen(sharded(), (), [mac(n) for n in NAMES], [three("jaccl", off=(0, 2))])
    why = refusal(view)
    assert "rdma_ctl enable" in summary_line(why)
    assert [node for node, no in why.refusals if no.reason == "RdmaOff"] == ["mac-0", "mac-2"]


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
    view = seen(sharded(priority=10), nodes=nodes, groups=[PAIR])
    decided = plan(view)
    assert planned(view) == ["!low-0 for qwen-0"]
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
