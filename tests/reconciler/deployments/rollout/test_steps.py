"""Rollouts from one version to the next: tables of situations."""

from dataclasses import replace

import pytest

from reconciler.deployments.actions import SaveRevision
from reconciler.deployments.execute import WriteContext, make_write
from reconciler.deployments.observe import DeploymentView, ReplicaView
from reconciler.deployments.plan import plan
from reconciler.deployments.rollout.revisions import (
    change_cause,
    content_of,
    describe_difference,
    template_hash,
)
from reconciler.placement.inputs import NodeView
from reconciler.placement.refusals import summary_line
from reconciler.placement.table import NodeTable
from schemas.deployment import CanaryStatus, ModelDeployment, Revision
from schemas.meta import CHANGE_CAUSE
from schemas.placement import Placement
from schemas.rollout import Canary, CanaryStep, Rollout
from store.port import Put
from tests.support.reconciler_world import planned
from tests.support.world import (
    NOW,
    deployment,
    node,
    observed,
    replica,
    revision,
    with_metadata,
    with_spec,
)

A, B = node("a"), node("b")
# Memory for replicas that are there, or for others in their places, and for none beside them.
FULL = node("a", used_bytes=int(5.5 * 2**30))
TIGHT = node("a", used_bytes=int(7.5 * 2**30))
GONE = node("gone", is_ready=False)


def fresh(ordinal: int, *, is_ready: bool = True) -> ReplicaView:
    return replica(ordinal, is_ready=is_ready)


def old(ordinal: int, *, is_ready: bool = True, is_deleting: bool = False) -> ReplicaView:
    return replica(ordinal, is_ready=is_ready, is_outdated=True, is_deleting=is_deleting)


def away(ordinal: int) -> ReplicaView:
    """Return an outdated replica with an absent agent: it has no endpoint, but still serves."""
    return replica(ordinal, is_outdated=True, is_ready=False, reported_ready=True)


LOST = replica(0, on="gone", is_outdated=True, is_node_lost=True)


def rolling(wanted: int, **settings: object) -> ModelDeployment:
    return deployment(replicas=wanted, rollout=Rollout.model_validate(settings))


FOUR = tuple(map(old, range(4)))
SITUATIONS = [
    pytest.param(rolling(2), (old(0), old(1)), (A,), ["+qwen-2@a"], id="one-more-comes-first"),
    pytest.param(rolling(2), (old(0), old(1), fresh(2, is_ready=False)), (A,), [], id="none-ends-before-the-new-one-answers"),
    pytest.param(rolling(2), (old(0), old(1), fresh(2)), (A,), ["-qwen-0 Outdated"], id="then-an-old-one-ends"),
    pytest.param(rolling(2), (old(1), fresh(2)), (A,), ["+qwen-0@a"], id="and-the-next-one-comes"),
    pytest.param(rolling(2), (old(1), fresh(0), fresh(2)), (A,), ["-qwen-1 Outdated"], id="the-last-old-one-ends"),
    pytest.param(rolling(2), (fresh(0), fresh(2)), (A,), [], id="names-do-not-matter"),
    pytest.param(
        rolling(2), (old(0), old(1, is_ready=False)), (A,), ["-qwen-1 Outdated", "+qwen-2@a", "+qwen-3@a"],
        id="what-does-not-answer-is-missed-by-nobody",
    ),
    pytest.param(rolling(4, maxSurge="50%"), FOUR, (A,), ["+qwen-4@a", "+qwen-5@a"], id="surge-as-a-part"),
    pytest.param(rolling(4, maxSurge=0, maxUnavailable=2), FOUR, (A,), ["-qwen-0 Outdated", "-qwen-1 Outdated"], id="max-unavailable"),
    pytest.param(rolling(2), (old(0), old(1)), (FULL,), ["-qwen-0 OutdatedInPlace"], id="no-room-for-one-more-so-in-place"),
    pytest.param(rolling(2), (old(0), old(1, is_ready=False)), (FULL,), ["-qwen-1 Outdated"], id="in-place-takes-what-does-not-answer-first"),
    pytest.param(rolling(2), (old(1), old(0, is_deleting=True)), (FULL,), [], id="in-place-one-at-a-time"),
    pytest.param(rolling(2), (fresh(0, is_ready=False), old(1)), (FULL,), [], id="in-place-waits-until-all-answer"),
    pytest.param(rolling(2, maxSurge=0), (old(0), old(1)), (A,), ["-qwen-0 OutdatedInPlace"], id="both-limits-0-is-in-place"),
    pytest.param(rolling(1), (old(0), old(1), old(2)), (A,), ["-qwen-0 Outdated", "-qwen-1 Outdated"], id="scaled-down-while-rolling"),
    pytest.param(
        rolling(2, strategy="Recreate"), (old(0), old(1)), (A,), ["-qwen-0 Outdated", "-qwen-1 Outdated"], id="recreate-ends-all",
    ),
    pytest.param(rolling(2, strategy="Recreate"), (old(0, is_deleting=True),), (A,), [], id="recreate-waits-for-the-last"),
    pytest.param(rolling(2, strategy="Recreate"), (), (A,), ["+qwen-0@a", "+qwen-1@a"], id="recreate-then-makes-all"),
    pytest.param(rolling(2, paused=True), (old(0), old(1)), (A,), [], id="paused-does-nothing"),
    pytest.param(rolling(1, paused=True), (old(0), fresh(1)), (A,), ["-qwen-0 ScaledDown"], id="paused-scales-down"),
    pytest.param(rolling(1), (LOST,), (GONE, A), [">qwen-0@a"], id="a-lost-one-moves-and-that-renews-it"),
    pytest.param(rolling(1), (LOST,), (GONE,), [], id="a-lost-one-that-has-nowhere-to-go-stays"),
    pytest.param(
        rolling(0, maxSurge="25%", maxUnavailable="25%"), (old(0),), (A,), ["-qwen-0 ScaledDown"], id="both-limits-may-round-to-zero",
    ),
    pytest.param(rolling(2), (away(0), away(1)), (A,), ["+qwen-2@a"], id="an-absent-agent-may-still-serve"),
    pytest.param(rolling(2), (away(0), away(1)), (TIGHT,), [], id="and-nothing-ends-where-the-new-version-does-not-fit"),
]  # fmt: skip


@pytest.mark.parametrize(("wanted", "replicas", "nodes", "actions"), SITUATIONS)
def test_rolling(
    wanted: ModelDeployment,
    replicas: tuple[ReplicaView, ...],
    nodes: tuple[NodeView, ...],
    actions: list[str],
) -> None:
    assert planned(observed(wanted, replicas, nodes)) == actions


def test_a_surge_preempts_nothing_and_is_no_shortage() -> None:
    assert plan(observed(rolling(2), (old(0), old(1)), (FULL,))).unschedulable is None
    # A missing replica is one, and does not block the others.
    decided = plan(observed(rolling(3), (old(0), old(1)), (FULL,)))
    assert len(decided.actions) == 1
    assert decided.unschedulable is not None


def test_new_replicas_are_spread_without_regard_to_old_ones() -> None:
    # One new replica is on a beside an old one of b: the next one goes to b.
    a, b = (node(name, replicas={"qwen": 1}, used_bytes=2**30) for name in "ab")
    view = observed(rolling(2), (fresh(2), replica(1, on="b", is_outdated=True)), (a, b))
    assert planned(view) == ["+qwen-0@b"]
    # With one replica per node, the old one counts until it has ended.
    alone = with_spec(rolling(2), placement=Placement(max_replicas_per_node=1))
    assert planned(replace(view, deployment=alone)) == ["-qwen-1 OutdatedInPlace"]


def test_a_version_that_fits_nowhere_ends_no_replica() -> None:
    decided = plan(observed(rolling(2), (old(0), old(1)), (TIGHT,)))
    assert decided.actions == ()
    assert decided.stuck is not None
    assert summary_line(decided.stuck).startswith("0/1 nodes fit: 1 short of memory (need 2.8 GiB")


def test_a_lost_replica_keeps_its_version_if_the_new_one_fits_nowhere() -> None:
    now = deployment(replicas=2, context_length=9000)  # the model was made for 8192
    running = replica(1, of=BEFORE)
    view = observed(now, (running,), (A,), revisions=(revision(BEFORE, 1), revision(now, 2)))
    view = replace(view, stable_template=template_hash(BEFORE))
    decided = plan(view)
    assert planned(view) == ["+qwen-0@a"]
    assert contexts(view) == [512]
    assert decided.unschedulable is None
    assert decided.stuck is not None
    # One on a lost node moves as it was.
    lost = replica(0, of=BEFORE, on="gone", is_node_lost=True)
    view = replace(view, replicas=(lost, running), table=NodeTable((GONE, A)))
    assert planned(view) == [">qwen-0@a"]
    assert contexts(view) == [512]


# Revisions.

BEFORE = deployment(replicas=2, context_length=512)


def saved(
    wanted: ModelDeployment, *revisions: Revision, cause: str | None = None
) -> tuple[int, str]:
    """Return number and cause of the revision that the plan saves; `cause` is the annotation now."""
    if cause is not None:
        wanted = with_metadata(wanted, annotations={CHANGE_CAUSE: cause})
    (action,) = plan(observed(wanted, (), (A,), revisions=revisions)).actions
    assert isinstance(action, SaveRevision)
    return action.number, action.cause


def saved_as(of: ModelDeployment, number: int, *, cause: str = "", annotated: str = "") -> Revision:
    """Return a revision with the recorded cause, and the annotation that was there when it was saved."""
    notes = {CHANGE_CAUSE: annotated} if annotated else {}
    return with_spec(with_metadata(revision(of, number), annotations=notes), change_cause=cause)


def test_a_new_version_is_saved_before_its_replicas_are_created() -> None:
    view = observed(deployment(), (), (A,), revisions=(revision(BEFORE),))
    assert planned(view) == ["r2", "+qwen-0@a"]


def test_a_revision_keeps_why_it_came() -> None:
    number, cause = saved(deployment(replicas=0, memory="3Gi"), revision(BEFORE))
    assert (number, cause) == (2, "contextLength 512 -> 1024, resources.memory none -> 3Gi")
    first, again = content_of(BEFORE), content_of(BEFORE).model_copy(update={"restarted_at": "T"})
    assert describe_difference(first, again) == "restarted at T"
    assert describe_difference(again, first) == "restart undone"
    named = with_metadata(BEFORE, annotations={CHANGE_CAUSE: "longer contexts"})
    assert change_cause(named, None, None) == "longer contexts"
    assert change_cause(named, revision(deployment(), 1), None) == "longer contexts"


def test_an_annotation_that_was_there_before_is_no_cause() -> None:
    """The history after annotate, patch, `rollout undo`, and an edit (kubectl's annotate is per revision)."""
    noted = "longer context"
    one, two, three = (deployment(replicas=0, context_length=n) for n in (512, 1024, 2048))
    first, second = saved_as(one, 1), saved_as(two, 2, cause=noted, annotated=noted)
    undone = saved(one, first, second, cause=noted)
    assert undone == (3, "undo to revision 1")
    third = saved_as(one, 3, cause=undone[1], annotated=noted)
    assert saved(three, second, third, cause=noted) == (4, "contextLength 512 -> 2048")
    assert saved(three, second, third, cause="even longer") == (4, "even longer")
    # Back to a revision that had a cause of its own; the third one recorded no annotation.
    older = saved_as(one, 3, cause=noted)
    assert saved(two, second, older, cause=noted) == (4, f"undo to revision 2: {noted}")


def test_the_annotation_is_kept_with_the_revision() -> None:
    noted = with_metadata(deployment(replicas=0), annotations={CHANGE_CAUSE: "faster"})
    (action,) = plan(observed(noted, (), (A,), revisions=())).actions
    (put,) = make_write(action, noted, {}, WriteContext(now=NOW, secret=str)).operations
    assert isinstance(put, Put)
    assert b'"kubernetes.io/change-cause":"faster"' in put.value.replace(b": ", b":")


def test_going_back_makes_an_earlier_version_the_newest() -> None:
    now = deployment(replicas=0)
    view = observed(now, (), (A,), revisions=(revision(now, 1), revision(BEFORE, 2)))
    assert planned(view) == ["r3"]


def test_only_so_many_earlier_versions_are_kept() -> None:
    now = rolling(1, revisionHistoryLimit=1)
    versions = [deployment(context_length=100 + n) for n in range(3)]
    revisions = tuple(revision(version, n + 1) for n, version in enumerate(versions))
    view = observed(now, (replica(0),), (A,), revisions=(*revisions, revision(now, 4)))
    assert planned(view) == [f"xr {revisions[0].name}", f"xr {revisions[1].name}"]
    # A version that still runs can be rolled back to.
    view = replace(view, replicas=(replica(0), replica(1, of=versions[0])))
    assert [sign for sign in planned(view) if sign.startswith("xr")] == [f"xr {revisions[1].name}"]


def test_revisions_go_with_their_deployment() -> None:
    view = observed(deployment(is_deleting=True), (), (A,), revisions=(revision(BEFORE),))
    assert planned(view) == [f"xr {revision(BEFORE).name}", "Xqwen"]
    # Also those of an earlier deployment of the name.
    stranger = revision(BEFORE)
    owner = stranger.metadata.owner_references[0].model_copy(update={"uid": "another"})
    stranger = with_metadata(stranger, owner_references=(owner,))
    now = deployment(replicas=0)
    view = observed(now, (), (A,), revisions=(stranger, revision(now)))
    assert planned(view) == [f"xr {stranger.name}"]


# Paused, and canaries.


def stable(
    *replicas: ReplicaView, canary: CanaryStatus | None = None, rollout: Rollout | None = None
) -> DeploymentView:
    """Return a fleet with the version BEFORE, whose deployment analyses another one."""
    steps = (CanaryStep(weight=10), CanaryStep(weight=60))
    now = deployment(replicas=2, rollout=rollout or Rollout(canary=Canary(steps=steps)))
    saved = (revision(BEFORE, 1), revision(now, 2))
    view = observed(now, replicas, (GONE, A, B), revisions=saved)
    return replace(view, stable_template=template_hash(BEFORE), canary=canary)


def before(ordinal: int, *, on: str = "a", is_node_lost: bool = False) -> ReplicaView:
    return replica(ordinal, on=on, of=BEFORE, is_node_lost=is_node_lost, is_ready=not is_node_lost)


def trial(**changes: object) -> CanaryStatus:
    template = template_hash(deployment(replicas=2))
    return CanaryStatus(template=template, since=NOW).model_copy(update=changes)


def contexts(view: DeploymentView) -> list[int]:
    """Return the context length of what actions make, which distinguishes the two versions."""
    contents = [getattr(action, "content", None) for action in plan(view).actions]
    return [content.context_length for content in contents if content is not None]


GONE_0 = before(0, on="gone", is_node_lost=True)
FAILED, PASSED = trial(outcome="Failed"), trial(step=2, weight=100, outcome="Passed")
BOTH = (before(0), before(1))
CANARIES = [
    pytest.param(stable(GONE_0, rollout=Rollout(paused=True)), [">qwen-0@a", "+qwen-1@b"], [512, 512], id="paused-makes-the-old-version"),
    pytest.param(stable(*BOTH), ["+qwen-2@a"], [1024], id="a-canary-starts-beside-the-stable-replicas"),
    pytest.param(stable(*BOTH, fresh(2), canary=trial(weight=10)), [], [], id="a-running-one-does-not-touch-them"),
    pytest.param(stable(*BOTH, fresh(2), canary=trial(step=1, weight=10)), ["+qwen-3@a"], [1024], id="a-later-step-gets-more-replicas"),
    pytest.param(stable(*BOTH, fresh(2), canary=PASSED), ["-qwen-0 Outdated"], [], id="passed-rolls-on"),
    pytest.param(stable(*BOTH, fresh(2), canary=FAILED), ["-qwen-2 Outdated"], [], id="failed-is-rolled-back"),
    pytest.param(stable(*BOTH, canary=FAILED), [], [], id="failed-stays-back"),
    pytest.param(stable(before(0), canary=FAILED), ["+qwen-1@a"], [512], id="failed-makes-the-stable-version"),
    pytest.param(stable(GONE_0, before(1), fresh(2), canary=trial(weight=10)), [">qwen-0@a"], [512], id="a-canary-loses-a-node"),
    pytest.param(replace(stable(*BOTH), table=NodeTable((FULL,))), ["-qwen-0 OutdatedInPlace"], [], id="without-room-it-takes-a-place"),
    pytest.param(stable(before(1)), ["+qwen-0@a"], [1024], id="then-the-place-is-the-canarys"),
    pytest.param(stable(before(1), fresh(0), canary=trial(weight=10)), [], [], id="and-the-other-one-stays-alone"),
    pytest.param(replace(stable(), stable_template=""), ["+qwen-0@a", "+qwen-1@b"], [1024, 1024], id="a-first-version-has-no-canary"),
]  # fmt: skip


@pytest.mark.parametrize(("view", "actions", "context_lengths"), CANARIES)
def test_canaries(view: DeploymentView, actions: list[str], context_lengths: list[int]) -> None:
    assert (planned(view), contexts(view)) == (actions, context_lengths)
