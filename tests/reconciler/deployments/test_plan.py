"""The plan of one deployment: tables of situations for creation, deletion and eviction."""

from dataclasses import replace

import pytest

from reconciler.deployments.observe import DeploymentView, ReplicaView
from reconciler.deployments.plan import plan
from reconciler.deployments.rollout.revisions import template_hash
from schemas.meta import ORPHAN
from schemas.node import Taint
from schemas.placement import Placement, Toleration
from tests.support.reconciler_world import planned
from tests.support.world import deployment, node, observed, replica, with_metadata

A, B = node("a"), node("b")
GONE = node("gone", is_ready=False)
STUCK = replica(0, is_ready=False, cannot_start=True)
LOST = replica(0, on="gone", is_node_lost=True)
STOPPED = replica(0, is_deleting=True, is_stopped=True)
STRANGER = replace(replica(0), is_owned=False)
ORPHANING = with_metadata(deployment(is_deleting=True), finalizers=(ORPHAN,))


def orphan(ordinal: int, *, is_deleting: bool = False, is_stopped: bool = False) -> ReplicaView:
    view = replica(ordinal, is_deleting=is_deleting, is_stopped=is_stopped)
    return replace(view, replica=with_metadata(view.replica, owner_references=()))


DRAINED = node("d", is_cordoned=True, leave_reason="it is drained")
FULL = node("full", memory_gib=0.5)
TAINTED = node("d", taints=(Taint(key="broken", effect="NoExecute"),))
TOLERANT = Placement(tolerations=(Toleration(key="broken", operator="Exists"),))
AWAY = replica(0, on="d", is_ready=False, reported_ready=True)


def tainted(effect: str) -> DeploymentView:
    taint = Taint.model_validate({"key": "owner", "effect": effect})
    return observed(deployment(), (replica(0),), (node("a", taints=(taint,)),))


def on(name: str, *ordinals: int, is_ready: bool = True) -> tuple[ReplicaView, ...]:
    return tuple(replica(ordinal, on=name, is_ready=is_ready) for ordinal in ordinals)


SITUATIONS = [
    pytest.param(observed(deployment(replicas=0), (), (A,)), [], id="nothing-wanted"),
    pytest.param(observed(deployment(replicas=2), (), (A, B)), ["+qwen-0@a", "+qwen-1@b"], id="spread"),
    pytest.param(observed(deployment(replicas=2), (), (A,)), ["+qwen-0@a", "+qwen-1@a"], id="stack"),
    pytest.param(observed(deployment(), (replica(0),), (A,)), [], id="settled"),
    pytest.param(observed(deployment(), (replica(0), replica(1)), (A,)), ["-qwen-1 ScaledDown"], id="scale-down-takes-the-highest"),
    pytest.param(observed(deployment(replicas=0), (replica(0),), (A,)), ["-qwen-0 ScaledDown"], id="scale-to-zero"),
    pytest.param(observed(deployment(replicas=0), (replica(0, is_deleting=True),), (A,)), [], id="a-draining-replica-is-left-alone"),
    pytest.param(observed(deployment(replicas=0), (STOPPED,), (A,)), ["xqwen-0"], id="a-stopped-replica-is-removed"),
    pytest.param(
        observed(deployment(replicas=0), (replica(0, is_deleting=True, is_node_lost=True),), (A,)), ["xqwen-0"],
        id="no-agent-is-there-to-stop-it",
    ),
    pytest.param(observed(deployment(), (replica(0, is_deleting=True),), (A, B)), ["+qwen-1@a"], id="a-name-is-used-again-only-when-it-is-free"),
    pytest.param(observed(deployment(), (LOST,), (GONE, A)), [">qwen-0@a"], id="a-lost-node-gives-up-its-replica"),
    pytest.param(observed(deployment(), (LOST,), (GONE,)), [], id="nowhere-to-go-so-it-stays"),
    pytest.param(
        observed(deployment(), (replica(0, on="gone", is_ready=False),), (GONE, A)), [], id="within-the-grace-period-nothing-moves",
    ),
    pytest.param(observed(deployment(), (STUCK,), (A, B)), [">qwen-0@b"], id="what-cannot-start-moves"),
    pytest.param(
        observed(deployment(replicas=2), (STUCK, replica(1, on="b")), (node("a", is_cordoned=True), B)), [">qwen-0@b"],
        id="what-cannot-start-moves-beside-another-one",
    ),
    pytest.param(observed(deployment(), (STUCK,), (A,)), [], id="what-cannot-start-stays-without-another-node"),
    pytest.param(observed(deployment(), (replica(0, cannot_start=True),), (A, B)), [], id="what-serves-stays"),
    pytest.param(observed(deployment(is_deleting=True), (replica(0),), (A,)), ["-qwen-0 OwnerDeleted"], id="deletion-drains-first"),
    pytest.param(observed(deployment(is_deleting=True), (), (A,)), ["Xqwen"], id="deletion-removes-last"),
    pytest.param(observed(None, (replica(0),), (A,)), ["-qwen-0 OwnerDeleted"], id="what-lost-its-owner-ends"),
    pytest.param(
        observed(deployment(), (replica(0, is_outdated=True, is_node_lost=True),), (GONE, A)), [">qwen-0@a"],
        id="an-outdated-replica-on-a-lost-node-just-moves",
    ),
    pytest.param(observed(deployment(), (STRANGER,), (A,)), ["-qwen-0 OwnerReplaced", "+qwen-1@a"], id="of-an-earlier-deployment"),
    pytest.param(observed(None, (STRANGER,), (A,)), ["-qwen-0 OwnerDeleted"], id="of-an-earlier-deployment-that-is-gone"),
    # Orphans.
    pytest.param(observed(ORPHANING, (replica(0),), (A,)), ["oqwen-0"], id="orphans-are-let-go-before-the-deployment-goes"),
    pytest.param(observed(ORPHANING, (orphan(0),), (A,)), ["Xqwen"], id="then-it-goes"),
    pytest.param(observed(ORPHANING, (replica(0, is_deleting=True), orphan(1)), (A,)), [], id="what-drains-ends-even-then"),
    pytest.param(observed(ORPHANING, (STOPPED, orphan(1)), (A,)), ["xqwen-0"], id="and-is-removed"),
    pytest.param(observed(None, (orphan(0),), (A,)), [], id="an-orphan-stays"),
    pytest.param(observed(None, (orphan(0, is_deleting=True, is_stopped=True),), (A,)), ["xqwen-0"], id="until-it-is-deleted"),
    pytest.param(observed(deployment(), (orphan(0),), (A,)), ["aqwen-0"], id="a-deployment-of-the-name-adopts-it"),
    pytest.param(observed(deployment(), (replica(0, is_outdated=True),), (A,)), ["+qwen-1@a"], id="then-it-rolls-if-outdated"),
    # Nodes that replicas must leave.
    pytest.param(observed(deployment(), on("d", 0), (DRAINED, B)), ["+qwen-1@b"], id="replaced-first"),
    pytest.param(observed(deployment(), (*on("d", 0), *on("b", 1, is_ready=False)), (DRAINED, B)), [], id="waits-for-the-replacement"),
    pytest.param(observed(deployment(), (*on("d", 0), *on("b", 1)), (DRAINED, B)), ["-qwen-0 Evicted"], id="then-goes"),
    pytest.param(
        observed(deployment(), on("d", 0, is_ready=False), (DRAINED, B)), ["-qwen-0 Evicted", "+qwen-1@b"],
        id="what-does-not-answer-goes-at-once",
    ),
    pytest.param(observed(deployment(), on("d", 0), (DRAINED, FULL)), ["-qwen-0 Evicted"], id="without-a-place-it-goes-by-default"),
    pytest.param(observed(deployment(min_available=1), on("d", 0), (DRAINED, FULL)), [], id="min-available-holds-it"),
    pytest.param(
        observed(deployment(replicas=3, min_available="50%"), on("d", 0, 1, 2), (DRAINED, FULL)), ["-qwen-0 Evicted"],
        id="as-many-as-min-available-allows",
    ),
    pytest.param(observed(deployment(replicas=0), on("d", 0), (DRAINED, B)), ["-qwen-0 Evicted"], id="what-nobody-wants-goes"),
    pytest.param(observed(deployment(min_available=1), (AWAY,), (DRAINED, FULL)), [], id="an-absent-agent-may-still-serve"),
    pytest.param(
        observed(deployment(min_available=1), on("d", 0), (TAINTED, B)), ["-qwen-0 Evicted", "+qwen-1@b"], id="no-execute-evicts-at-once",
    ),
    pytest.param(observed(deployment(placement=TOLERANT), on("d", 0), (TAINTED, B)), [], id="a-tolerant-replica-stays"),
    pytest.param(tainted("NoSchedule"), [], id="no-schedule-moves-nothing"),
    pytest.param(tainted("PreferNoSchedule"), [], id="prefer-no-schedule-moves-nothing"),
    pytest.param(
        observed(deployment(min_available=1), (replica(0, on="d", is_node_lost=True),), (replace(DRAINED, is_ready=False), B)),
        [">qwen-0@b"], id="a-lost-drained-node",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("view", "wanted"), SITUATIONS)
def test_plan(view: DeploymentView, wanted: list[str]) -> None:
    assert planned(view) == wanted


def test_unplaced_replicas_are_explained() -> None:
    decided = plan(observed(deployment(), (), (GONE, node("small", memory_gib=1))))
    assert decided.actions == ()
    assert decided.unschedulable is not None
    reasons = {name: why.reason for name, why in decided.unschedulable.refusals}
    assert reasons == {"gone": "NodeNotReady", "small": "InsufficientMemory"}
    few = observed(deployment(replicas=3), (), (node("a", memory_gib=3.5),))
    assert planned(few) == ["+qwen-0@a"]
    assert plan(few).unschedulable is not None


@pytest.mark.parametrize(
    ("change", "restarts"),
    [
        ({"context_length": 2048}, True),
        ({"concurrency": 2}, True),
        ({"served_names": ("fast",)}, True),
        ({"replicas": 5}, False),
        ({"placement": Placement(pools=("p",))}, False),
    ],
)
def test_only_fields_that_an_engine_depends_on_change_the_template(
    change: dict[str, object], restarts: bool
) -> None:
    changed = deployment(**change)  # type: ignore[arg-type]  # by their names
    assert (template_hash(changed) != template_hash(deployment())) is restarts
