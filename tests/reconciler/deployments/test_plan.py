"""The plan of one deployment: tables of situations for creation, deletion and eviction."""

from dataclasses import replace

import pytest

from reconciler.deployments.observe import DeploymentView, ReplicaView
from reconciler.deployments.plan import plan
from reconciler.deployments.rollout.revisions import template_hash
from schemas.deployment import ModelDeployment
from schemas.meta import ORPHAN
from schemas.node import Taint
from schemas.placement import Placement, Toleration
from tests.support.reconciler_shorthand import short
from tests.support.world import deployment, node, observed, replica

A, B = node("a"), node("b")
GONE = node("gone", is_ready=False)

SITUATIONS = [
    pytest.param(observed(deployment(replicas=0), (), (A,)), [], id="nothing-wanted"),
    pytest.param(
        observed(deployment(replicas=2), (), (A, B)), ["+qwen-0@a", "+qwen-1@b"], id="spread"
    ),
    pytest.param(
        observed(deployment(replicas=2), (), (A,)), ["+qwen-0@a", "+qwen-1@a"], id="stack"
    ),
    pytest.param(observed(deployment(), (replica(0),), (A,)), [], id="settled"),
    pytest.param(
        observed(deployment(replicas=1), (replica(0), replica(1)), (A,)),
        ["-qwen-1 ScaledDown"],
        id="scale-down-takes-the-highest",
    ),
    pytest.param(
        observed(deployment(replicas=0), (replica(0),), (A,)),
        ["-qwen-0 ScaledDown"],
        id="scale-to-zero",
    ),
    pytest.param(
        observed(deployment(replicas=0), (replica(0, is_deleting=True),), (A,)),
        [],
        id="a-draining-replica-is-left-alone",
    ),
    pytest.param(
        observed(deployment(replicas=0), (replica(0, is_deleting=True, is_stopped=True),), (A,)),
        ["xqwen-0"],
        id="a-stopped-replica-is-removed",
    ),
    pytest.param(
        observed(deployment(replicas=0), (replica(0, is_deleting=True, is_node_lost=True),), (A,)),
        ["xqwen-0"],
        id="nobody-is-left-to-stop-it",
    ),
    pytest.param(
        observed(deployment(), (replica(0, is_deleting=True),), (A, B)),
        ["+qwen-1@a"],
        id="a-name-is-used-again-only-when-it-is-free",
    ),
    pytest.param(
        observed(deployment(), (replica(0, on="gone", is_node_lost=True),), (GONE, A)),
        [">qwen-0@a"],
        id="a-lost-node-gives-up-its-replica",
    ),
    pytest.param(
        observed(deployment(), (replica(0, on="gone", is_node_lost=True),), (GONE,)),
        [],
        id="nowhere-to-go-so-it-stays",
    ),
    pytest.param(
        observed(deployment(), (replica(0, on="gone", is_ready=False),), (GONE, A)),
        [],
        id="within-the-grace-period-nothing-moves",
    ),
    pytest.param(
        observed(deployment(), (replica(0, is_ready=False, cannot_start=True),), (A, B)),
        [">qwen-0@b"],
        id="what-cannot-start-moves",
    ),
    pytest.param(
        observed(
            deployment(replicas=2),
            (replica(0, is_ready=False, cannot_start=True), replica(1, on="b")),
            (replace(A, is_cordoned=True), B),
        ),
        [">qwen-0@b"],
        id="what-cannot-start-moves-beside-another-one",
    ),
    pytest.param(
        observed(deployment(), (replica(0, is_ready=False, cannot_start=True),), (A,)),
        [],
        id="what-cannot-start-stays-without-another-node",
    ),
    pytest.param(
        observed(deployment(), (replica(0, cannot_start=True),), (A, B)),
        [],
        id="what-serves-stays",
    ),
    pytest.param(
        observed(deployment(is_deleting=True), (replica(0),), (A,)),
        ["-qwen-0 OwnerDeleted"],
        id="deletion-drains-first",
    ),
    pytest.param(
        observed(deployment(is_deleting=True), (), (A,)), ["Xqwen"], id="deletion-removes-last"
    ),
    pytest.param(
        observed(None, (replica(0),), (A,)), ["-qwen-0 OwnerDeleted"], id="what-lost-its-owner-ends"
    ),
    pytest.param(
        observed(deployment(), (replica(0, is_outdated=True, is_node_lost=True),), (GONE, A)),
        [">qwen-0@a"],
        id="an-outdated-replica-on-a-lost-node-just-moves",
    ),
]


@pytest.mark.parametrize(("seen", "wanted"), SITUATIONS)
def test_plan(seen: DeploymentView, wanted: list[str]) -> None:
    assert [short(action) for action in plan(seen).actions] == wanted


def test_a_replica_of_an_earlier_deployment_is_ended() -> None:
    stranger = replace(replica(0), is_owned=False)
    decided = plan(observed(deployment(), (stranger,), (A,)))
    assert [short(action) for action in decided.actions] == [
        "-qwen-0 OwnerReplaced",
        "+qwen-1@a",
    ]


def test_unplaced_replicas_are_explained() -> None:
    decided = plan(observed(deployment(), (), (GONE, node("small", memory_gib=1))))
    assert decided.actions == ()
    assert decided.unschedulable is not None
    reasons = {name: why.reason for name, why in decided.unschedulable.refusals}
    assert reasons == {"gone": "NodeNotReady", "small": "InsufficientMemory"}


def test_some_are_placed_even_if_not_all_fit() -> None:
    decided = plan(observed(deployment(replicas=3), (), (node("a", memory_gib=3.5),)))
    assert [short(action) for action in decided.actions] == ["+qwen-0@a"]
    assert decided.unschedulable is not None


@pytest.mark.parametrize(
    "change",
    [
        {"context_length": 2048},
        {"concurrency": 2},
        {"served_names": ("fast",)},
    ],
)
def test_every_field_an_engine_depends_on_moves_the_template(change: dict[str, object]) -> None:
    before = deployment()
    after = before.model_copy(update={"spec": before.spec.model_copy(update=change)})
    assert template_hash(before) != template_hash(after)


def test_scaling_or_placing_does_not_restart_engines() -> None:
    assert template_hash(deployment(replicas=1)) == template_hash(deployment(replicas=5))
    assert template_hash(deployment()) == template_hash(
        deployment(placement=Placement(pools=("p",)))
    )


LONE_NODE = node("a")


def orphaning() -> ModelDeployment:
    model_deployment = deployment(is_deleting=True)
    metadata = model_deployment.metadata.model_copy(update={"finalizers": (ORPHAN,)})
    return model_deployment.model_copy(update={"metadata": metadata})


def orphan(ordinal: int, *, is_deleting: bool = False, is_outdated: bool = False) -> ReplicaView:
    view = replica(ordinal, is_deleting=is_deleting, is_outdated=is_outdated)
    metadata = view.replica.metadata.model_copy(update={"owner_references": ()})
    return replace(view, replica=view.replica.model_copy(update={"metadata": metadata}))


def planned(seen: DeploymentView) -> list[str]:
    return [short(action) for action in plan(seen).actions]


def test_orphaned_replicas_are_let_go_before_their_deployment_goes() -> None:
    assert planned(observed(orphaning(), (replica(0),), (LONE_NODE,))) == ["oqwen-0"]
    assert planned(observed(orphaning(), (orphan(0),), (LONE_NODE,))) == ["Xqwen"]


def test_draining_replicas_end_even_when_orphaned() -> None:
    draining = replica(0, is_deleting=True)
    assert planned(observed(orphaning(), (draining, orphan(1)), (LONE_NODE,))) == []
    ended = replace(draining, is_stopped=True)
    assert planned(observed(orphaning(), (ended, orphan(1)), (LONE_NODE,))) == ["xqwen-0"]


def test_an_orphan_stays_until_it_is_deleted() -> None:
    assert planned(observed(None, (orphan(0),), (LONE_NODE,))) == []
    gone = replace(orphan(0, is_deleting=True), is_stopped=True)
    assert planned(observed(None, (gone,), (LONE_NODE,))) == ["xqwen-0"]


def test_a_deployment_of_the_name_adopts_orphans() -> None:
    assert planned(observed(deployment(), (orphan(0),), (LONE_NODE,))) == ["aqwen-0"]
    # Then it is one of its own, and rolls if it is outdated.
    assert planned(observed(deployment(), (replica(0, is_outdated=True),), (LONE_NODE,))) == [
        "+qwen-1@a"
    ]


def test_a_replica_of_a_deleted_owner_ends() -> None:
    stranger = replace(replica(0), is_owned=False)
    assert planned(observed(None, (stranger,), (LONE_NODE,))) == ["-qwen-0 OwnerDeleted"]


DRAINED = node("d", is_cordoned=True, leave_reason="it is drained")
OTHER_NODE = node("b")
FULL = node("full", memory_gib=0.5)


def on(name: str, *ordinals: int, is_ready: bool = True) -> tuple[ReplicaView, ...]:
    return tuple(replica(ordinal, on=name, is_ready=is_ready) for ordinal in ordinals)


EVICTIONS = [
    pytest.param(
        observed(deployment(), on("d", 0), (DRAINED, OTHER_NODE)),
        ["+qwen-1@b"],
        id="replaced-first",
    ),
    pytest.param(
        observed(
            deployment(),
            (*on("d", 0), *on("b", 1, is_ready=False)),
            (DRAINED, OTHER_NODE),
        ),
        [],
        id="waits-for-the-replacement",
    ),
    pytest.param(
        observed(deployment(), (*on("d", 0), *on("b", 1)), (DRAINED, OTHER_NODE)),
        ["-qwen-0 Evicted"],
        id="then-goes",
    ),
    pytest.param(
        observed(deployment(), on("d", 0, is_ready=False), (DRAINED, OTHER_NODE)),
        ["-qwen-0 Evicted", "+qwen-1@b"],
        id="what-does-not-answer-goes-at-once",
    ),
    pytest.param(
        observed(deployment(), on("d", 0), (DRAINED, FULL)),
        ["-qwen-0 Evicted"],
        id="without-a-place-it-goes-if-nothing-is-said",
    ),
    pytest.param(
        observed(deployment(min_available=1), on("d", 0), (DRAINED, FULL)),
        [],
        id="min-available-holds-it",
    ),
    pytest.param(
        observed(deployment(replicas=3, min_available="50%"), on("d", 0, 1, 2), (DRAINED, FULL)),
        ["-qwen-0 Evicted"],
        id="as-many-as-min-available-allows",
    ),
    pytest.param(
        observed(deployment(replicas=0), on("d", 0), (DRAINED, OTHER_NODE)),
        ["-qwen-0 Evicted"],
        id="what-nobody-wants-goes",
    ),
]


@pytest.mark.parametrize(("seen", "wanted"), EVICTIONS)
def test_leaving(seen: DeploymentView, wanted: list[str]) -> None:
    assert [short(action) for action in plan(seen).actions] == wanted


def test_a_replica_with_an_absent_agent_is_not_idle() -> None:
    away = replica(0, on="d", is_ready=False, reported_ready=True)
    view = observed(deployment(min_available=1), (away,), (DRAINED, FULL))
    assert plan(view).actions == ()


TAINTED = replace(node("d"), taints=(Taint(key="broken", effect="NoExecute"),))


def test_a_taint_drives_out_at_once() -> None:
    view = observed(deployment(min_available=1), on("d", 0), (TAINTED, OTHER_NODE))
    assert [short(action) for action in plan(view).actions] == ["-qwen-0 Evicted", "+qwen-1@b"]


def test_a_replica_that_tolerates_the_taint_stays() -> None:
    placement = Placement(tolerations=(Toleration(key="broken", operator="Exists"),))
    view = observed(deployment(placement=placement), on("d", 0), (TAINTED, OTHER_NODE))
    assert plan(view).actions == ()


def test_replicas_of_a_lost_drained_node_move() -> None:
    gone = replace(DRAINED, is_ready=False)
    lost = replica(0, on="d", is_node_lost=True)
    view = observed(deployment(min_available=1), (lost,), (gone, OTHER_NODE))
    assert [short(action) for action in plan(view).actions] == [">qwen-0@b"]
