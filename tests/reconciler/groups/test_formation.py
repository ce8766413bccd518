"""Plans for deployments on groups: a table of situations with their messages.

A Mac that cannot do RDMA is replaced by a spare in a group over JACCL.
"""

from dataclasses import replace

import pytest

from reconciler.deployments.actions import CreateReplica, ReformReplica
from reconciler.deployments.placer import Assignment, Placer
from reconciler.deployments.plan import plan
from reconciler.groups.epochs import Epoch
from reconciler.groups.group_view import GroupView
from reconciler.placement.inputs import NodeHold, NodeView, request_for
from reconciler.placement.refusals import summary_line
from reconciler.placement.table import NodeTable
from schemas.formation import GoldenAnswer
from schemas.node import Taint
from schemas.shardgroup import Backend
from tests.support.reconciler_fabric import group as cabled
from tests.support.reconciler_fabric import meshed, with_fabric
from tests.support.reconciler_world import (
    BIG,
    LAYER,
    counted,
    group,
    mac,
    on,
    seen,
    sharded,
    short,
)
from tests.support.world import GIB, node

A, B, C = mac("a"), mac("b"), mac("c")
AWAY = replace(B, is_ready=False)
QUIET = NodeHold(reason="NodeWithheld", message="quiet hours")
REBOOT = NodeHold(reason="NeedsReboot", message="a rank does not die")
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
def test_where_a_replica_goes(where: object, nodes: tuple[NodeView, ...], wanted: str) -> None:
    decided = plan(seen(sharded(), nodes=nodes, groups=[where]))  # type: ignore[list-item]
    assert [short(action) for action in decided.actions] == [wanted]
    assert decided.unschedulable is None


REFUSED = [
    pytest.param(
        PAIR, (A, mac("b", 5)),
        "1/2 members fit, 2 are needed at once: 1 too small even when empty (need 7.8 GiB, the largest has 5.0)", id="memory",
    ),
    pytest.param(PAIR, (A, AWAY), "1/2 members fit, 2 are needed at once: 1 NotReady", id="away"),
    pytest.param(PAIR, (A,), "1/2 members fit, 2 are needed at once: 1 not joined", id="never-there"),
    pytest.param(
        group("abc", parallelism="Tensor"), (A, B, C),
        "llama, 8 heads, 8 KV heads: Tensor works with 2 and 4, not 3; set size: 2, or parallelism: Pipeline, which works with 3",
        id="the-nearest-thing-that-works",
    ),
    pytest.param(
        group("abc"), (mac("a", 3), mac("b", 3), mac("c", 3)),
        "its layers do not fit as a Pipeline: the model needs 14.8 GiB on one Mac and more on 3, free are a 3.0 GiB, b 3.0 GiB, c 3.0 GiB; add a member and raise size, or lower the deployment's contextLength",
        id="auto-tells-of-the-way-that-the-model-has",
    ),
    pytest.param(
        group("ab", parallelism="Tensor"), (A, replace(B, chip="Apple M1", gpu_cores=8)),
        "Tensor needs equal Macs, because each does as much as the weakest: a (unknown chip, 0 GPU cores, 10.0 GiB), b (Apple M1, 8 GPU cores, 10.0 GiB); set parallelism: Pipeline, or allowUnequal: true",
        id="unlike",
    ),
    pytest.param(
        group("ab", parallelism="Pipeline"), (mac("a", 4), mac("b", 9)),
        "its layers do not fit as a Pipeline: the model needs 14.8 GiB on one Mac and more on 2, free are a 4.0 GiB, b 9.0 GiB; add a member and raise size, or lower the deployment's contextLength",
        id="no-split",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("where", "nodes", "wanted"), REFUSED)
def test_why_it_goes_nowhere(where: object, nodes: tuple[NodeView, ...], wanted: str) -> None:
    decided = plan(seen(sharded(), nodes=nodes, groups=[where]))  # type: ignore[list-item]
    assert decided.actions == ()
    assert decided.unschedulable is not None
    assert summary_line(decided.unschedulable) == f"ShardGroup pair: {wanted}"


def test_every_member_says_why_it_cannot() -> None:
    decided = plan(seen(sharded(), nodes=[AWAY, mac("a", 5)], groups=[PAIR]))
    assert decided.unschedulable is not None
    refused = {name: why.reason for name, why in decided.unschedulable.refusals}
    assert refused == {"b": "NodeNotReady"}
    decided = plan(seen(sharded(), nodes=[B, mac("a", 5)], groups=[PAIR]))
    assert decided.unschedulable is not None
    assert [name for name, _ in decided.unschedulable.refusals] == ["a"]


def test_a_group_that_is_not_there_is_named() -> None:
    decided = plan(seen(sharded("pear"), nodes=[A, B], groups=[PAIR]))
    assert decided.unschedulable is not None
    assert summary_line(decided.unschedulable) == (
        "ShardGroup pear: there is no such group; apply its manifest, or name another in spec.sharding"
    )


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
def test_auto(nodes: tuple[NodeView, ...], groups: list[object], wanted: str) -> None:
    decided = plan(seen(sharded("Auto"), nodes=nodes, groups=groups))  # type: ignore[arg-type]
    assert [short(action) for action in decided.actions] == ([wanted] if wanted else [])


def test_two_replicas_share_a_group_only_where_there_is_room() -> None:
    wide = [mac("a", 20), mac("b", 20)]
    two = plan(seen(sharded(replicas=2), nodes=wide, groups=[PAIR]))
    assert [short(action) for action in two.actions] == ["+qwen-0@a,b", "+qwen-1@a,b"]
    deployment_plan = plan(seen(sharded(replicas=2), nodes=[A, B], groups=[PAIR]))
    assert [short(action) for action in deployment_plan.actions] == ["+qwen-0@a,b"]
    assert deployment_plan.unschedulable is not None


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
def test_the_next_epoch(where: object, replica: object, nodes: object, wanted: str) -> None:
    situation = seen(sharded(), [replica], nodes, [where])  # type: ignore[list-item, arg-type]
    decided = plan(situation)
    assert [short(action) for action in decided.actions] == ([wanted] if wanted else [])


def test_the_next_epoch_keeps_leaving_ranks() -> None:
    """On a live Mac the old rank may still run; an absent Mac comes back without it."""
    replica = on("ab", epoch=replace(OVER, is_steady=True))
    nodes = (A, replace(B, holds=(REBOOT,)), C)
    (action,) = plan(seen(sharded(), [replica], nodes, [SPARE])).actions
    assert isinstance(action, ReformReplica)
    # On a the next rank is smaller than the one before.
    assert [(rank.node, rank.rank) for rank in action.leaving] == [("a", 0), ("b", 1)]
    assert {rank.memory_bytes for rank in action.leaving} == {9 * GIB}
    assert (action.failures, action.because) == (1, OVER.message)
    away = replace(on("ab", epoch=LOST), away_nodes=frozenset({"b"}))
    (action,) = plan(seen(sharded(), [away], (A, AWAY, C), [SPARE])).actions
    assert isinstance(action, ReformReplica)
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
    (same,) = plan(seen(sharded(), [on("ab", epoch=over)], (A, B), [SMALLER])).actions
    assert isinstance(same, ReformReplica)
    assert same.form.golden == golden
    fallen = on("ab", epoch=over, failures=2)
    (other,) = plan(seen(sharded(), [fallen], (A, B), [SMALLER])).actions
    assert isinstance(other, ReformReplica)
    assert (other.form.model, other.form.golden) == ("qwen-4bit", None)
    serving = on("ab", epoch=Epoch(is_steady=True, golden=golden))
    wide = (mac("a", 20), mac("b", 20))
    (new,) = plan(seen(sharded(replicas=2), [serving], wide, [PAIR])).actions
    assert isinstance(new, CreateReplica)
    assert new.form is not None
    assert new.form.golden == golden


def test_a_crash_loop_is_reported_and_ends() -> None:
    replica = on("ab", epoch=replace(OVER, is_given_up=True), failures=2)
    decided = plan(seen(sharded(), [replica], (A, B), [PAIR]))
    assert decided.actions == ()
    assert decided.unschedulable is not None
    assert summary_line(decided.unschedulable) == (
        "ShardGroup pair: qwen-0 failed 3 times in a row, in every shape; the last reason: rank 1 on b: it ended "
        "with -9. The next attempt comes within minutes; a change of the deployment or `fleetctl rollout restart` "
        "starts it at once"
    )
    changed = sharded(context_length=2048)
    decided = plan(seen(changed, [replica], (A, B), [PAIR]))
    assert "-qwen-0 Outdated" in [short(action) for action in decided.actions]


def test_auto_tries_another_group() -> None:
    auto = sharded("Auto")
    nodes = (A, AWAY, C, mac("d"))
    groups = [PAIR, group("cd", name="second")]
    decided = plan(seen(auto, [on("ab", of=auto, epoch=LOST)], nodes, groups))
    assert [short(action) for action in decided.actions] == ["-qwen-0 GroupLost"]


LEAVING = [
    pytest.param(SPARE, (A, B, C), "+qwen-1@a,c", id="another-first"),
    pytest.param(PAIR, (A, B), "-qwen-0 Evicted", id="else-it-ends"),
]


@pytest.mark.parametrize(("where", "nodes", "wanted"), LEAVING)
def test_any_rank_on_a_drained_node_counts(
    where: object, nodes: tuple[NodeView, ...], wanted: str
) -> None:
    wide = [
        replace(view, allocatable_bytes=20 * GIB)
        if view.name != "b"
        else replace(
            view, leave_reason="draining", holds=(NodeHold(reason="NodeDraining", message="so"),)
        )
        for view in nodes
    ]
    decided = plan(seen(sharded(), [on("ab")], wide, [where]))  # type: ignore[list-item]
    assert [short(action) for action in decided.actions] == [wanted]


def test_a_taint_evicts_the_whole_replica() -> None:
    tainted = replace(B, taints=(Taint(key="owner", effect="NoExecute"),))
    decided = plan(seen(sharded(), [on("ab")], (A, tainted), [PAIR]))
    assert [short(action) for action in decided.actions] == ["-qwen-0 Evicted"]


def test_a_new_version_takes_the_place_of_the_old_one() -> None:
    """A group has no room for two: the old one ends first, if the new one fits then."""
    before = on("ab")
    changed = sharded(context_length=2048)
    decided = plan(seen(changed, [before], (A, B), [PAIR]))
    assert [short(action) for action in decided.actions] == ["-qwen-0 OutdatedInPlace"]
    too_long = sharded(context_length=8192)
    small = (mac("a", 9), mac("b", 9))
    decided = plan(seen(too_long, [before], small, [PAIR]))
    assert decided.actions != ()
    narrow = (mac("a", 7.9), mac("b", 7.9))
    much = too_long.model_copy(
        update={"spec": too_long.spec.model_copy(update={"concurrency": 16})}
    )
    decided = plan(seen(much, [on("ab", share_gib=7)], narrow, [PAIR]))
    assert decided.actions == ()
    assert decided.stuck is not None


def test_actions_name_every_rank() -> None:
    (action,) = plan(seen(sharded(), nodes=[A, B], groups=[PAIR])).actions
    assert isinstance(action, CreateReplica)
    assert [rank.addresses for rank in action.ranks] == [("169.254.0.97",), ("169.254.0.98",)]
    assert action.form is not None
    assert (action.form.group, action.form.backend, action.form.parallelism) == (
        "pair",
        "ring",
        "Tensor",
    )


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
    situation = seen(sharded(), (), [mac(n) for n in NAMES], [three(backend, off=off)])
    actions = plan(situation).actions
    assert [short(action) for action in actions if isinstance(action, CreateReplica)] == [taken]


def test_a_refusal_names_each_mac() -> None:
    situation = seen(sharded(), (), [mac(n) for n in NAMES], [three("jaccl", off=(0, 2))])
    refused = plan(situation).unschedulable
    assert refused is not None
    assert "rdma_ctl enable" in summary_line(refused)
    assert [node for node, why in refused.refusals if why.reason == "RdmaOff"] == ["mac-0", "mac-2"]
