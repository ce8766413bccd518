"""Rollouts from one version to the next: a table of situations."""

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
from reconciler.placement.refusals import summary_line
from reconciler.placement.table import NodeTable
from schemas.deployment import CanaryStatus, ModelDeployment, Revision
from schemas.meta import CHANGE_CAUSE
from schemas.placement import Placement
from schemas.rollout import Canary, CanaryStep, Rollout
from store.port import Put
from tests.support.reconciler_shorthand import short
from tests.support.world import NOW, deployment, node, observed, replica, revision

A, B = node("a"), node("b")
# Room for replicas that are there, or for others in their places, and for none beside them.
FULL = replace(node("a"), used_bytes=int(5.5 * 2**30))
GONE = node("gone", is_ready=False)


def fresh(ordinal: int, *, is_ready: bool = True) -> ReplicaView:
    return replica(ordinal, is_ready=is_ready)


def old(ordinal: int, *, is_ready: bool = True) -> ReplicaView:
    return replica(ordinal, is_ready=is_ready, is_outdated=True)


def rolling(wanted: int, **settings: object) -> ModelDeployment:
    return deployment(replicas=wanted, rollout=Rollout.model_validate(settings))


SITUATIONS = [
    pytest.param(
        observed(rolling(2), (old(0), old(1)), (A,)), ["+qwen-2@a"], id="one-more-comes-first"
    ),
    pytest.param(
        observed(rolling(2), (old(0), old(1), fresh(2, is_ready=False)), (A,)),
        [],
        id="nobody-ends-before-the-new-one-answers",
    ),
    pytest.param(
        observed(rolling(2), (old(0), old(1), fresh(2)), (A,)),
        ["-qwen-0 Outdated"],
        id="then-an-old-one-ends",
    ),
    pytest.param(
        observed(rolling(2), (old(1), fresh(2)), (A,)), ["+qwen-0@a"], id="and-the-next-one-comes"
    ),
    pytest.param(
        observed(rolling(2), (old(1), fresh(0), fresh(2)), (A,)),
        ["-qwen-1 Outdated"],
        id="the-last-old-one-ends",
    ),
    pytest.param(observed(rolling(2), (fresh(0), fresh(2)), (A,)), [], id="names-do-not-matter"),
    pytest.param(
        observed(rolling(2), (old(0), old(1, is_ready=False)), (A,)),
        ["-qwen-1 Outdated", "+qwen-2@a", "+qwen-3@a"],
        id="what-does-not-answer-is-missed-by-nobody",
    ),
    pytest.param(
        observed(rolling(4, maxSurge="50%"), tuple(map(old, range(4))), (A,)),
        ["+qwen-4@a", "+qwen-5@a"],
        id="surge-as-a-part",
    ),
    pytest.param(
        observed(rolling(4, maxSurge=0, maxUnavailable=2), tuple(map(old, range(4))), (A,)),
        ["-qwen-0 Outdated", "-qwen-1 Outdated"],
        id="max-unavailable",
    ),
    pytest.param(
        observed(rolling(2), (old(0), old(1)), (FULL,)),
        ["-qwen-0 OutdatedInPlace"],
        id="no-room-for-one-more-so-in-place",
    ),
    pytest.param(
        observed(rolling(2), (old(0), old(1, is_ready=False)), (FULL,)),
        ["-qwen-1 Outdated"],
        id="in-place-takes-what-does-not-answer-first",
    ),
    pytest.param(
        observed(rolling(2), (old(1), replica(0, is_outdated=True, is_deleting=True)), (FULL,)),
        [],
        id="in-place-one-at-a-time",
    ),
    pytest.param(
        observed(rolling(2), (fresh(0, is_ready=False), old(1)), (FULL,)),
        [],
        id="in-place-waits-until-all-answer",
    ),
    pytest.param(
        observed(rolling(2, maxSurge=0), (old(0), old(1)), (A,)),
        ["-qwen-0 OutdatedInPlace"],
        id="both-limits-0-is-in-place",
    ),
    pytest.param(
        observed(rolling(1), (old(0), old(1), old(2)), (A,)),
        ["-qwen-0 Outdated", "-qwen-1 Outdated"],
        id="scaled-down-while-rolling",
    ),
    pytest.param(
        observed(rolling(2, strategy="Recreate"), (old(0), old(1)), (A,)),
        ["-qwen-0 Outdated", "-qwen-1 Outdated"],
        id="recreate-ends-all",
    ),
    pytest.param(
        observed(
            rolling(2, strategy="Recreate"),
            (replica(0, is_outdated=True, is_deleting=True),),
            (A,),
        ),
        [],
        id="recreate-waits-for-the-last",
    ),
    pytest.param(
        observed(rolling(2, strategy="Recreate"), (), (A,)),
        ["+qwen-0@a", "+qwen-1@a"],
        id="recreate-then-makes-all",
    ),
    pytest.param(
        observed(rolling(2, paused=True), (old(0), old(1)), (A,)), [], id="paused-does-nothing"
    ),
    pytest.param(
        observed(rolling(1, paused=True), (old(0), fresh(1)), (A,)),
        ["-qwen-0 ScaledDown"],
        id="paused-scales-down",
    ),
    pytest.param(
        observed(
            rolling(1), (replica(0, on="gone", is_outdated=True, is_node_lost=True),), (GONE, A)
        ),
        [">qwen-0@a"],
        id="a-lost-one-moves-and-that-renews-it",
    ),
    pytest.param(
        observed(
            rolling(1), (replica(0, on="gone", is_outdated=True, is_node_lost=True),), (GONE,)
        ),
        [],
        id="a-lost-one-that-has-nowhere-to-go-stays",
    ),
]


@pytest.mark.parametrize(("seen", "wanted"), SITUATIONS)
def test_rolling(seen: DeploymentView, wanted: list[str]) -> None:
    assert [short(action) for action in plan(seen).actions] == wanted


def test_a_surge_preempts_nothing_and_is_no_shortage() -> None:
    decided = plan(observed(rolling(2), (old(0), old(1)), (FULL,)))
    assert decided.unschedulable is None


def test_new_replicas_are_spread_without_regard_to_old_ones() -> None:
    # One new replica is on a beside an old one of b: the next one goes to b.
    a = replace(A, replicas={"qwen": 1}, used_bytes=2**30)
    b = replace(B, replicas={"qwen": 1}, used_bytes=2**30)
    view = observed(rolling(2), (fresh(2), replica(1, on="b", is_outdated=True)), (a, b))
    assert [short(action) for action in plan(view).actions] == ["+qwen-0@b"]
    # With one replica per node, the old one counts until it has ended.
    alone = rolling(2)
    placement = Placement(max_replicas_per_node=1)
    alone = alone.model_copy(
        update={"spec": alone.spec.model_copy(update={"placement": placement})}
    )
    view = replace(view, deployment=alone)
    assert [short(action) for action in plan(view).actions] == ["-qwen-1 OutdatedInPlace"]


def test_a_version_that_fits_nowhere_ends_no_replica() -> None:
    tight = replace(node("a"), used_bytes=int(7.5 * 2**30))
    decided = plan(observed(rolling(2), (old(0), old(1)), (tight,)))
    assert decided.actions == ()
    assert decided.stuck is not None
    assert summary_line(decided.stuck).startswith("0/1 nodes fit: 1 short of memory (need 2.8 GiB")


def away(ordinal: int) -> ReplicaView:
    """Return an outdated replica with an absent agent: it has no endpoint, but still serves."""
    return replica(ordinal, is_outdated=True, is_ready=False, reported_ready=True)


def test_a_replica_with_an_absent_agent_is_not_idle() -> None:
    view = observed(rolling(2), (away(0), away(1)), (A,))
    assert [short(action) for action in plan(view).actions] == ["+qwen-2@a"]
    tight = replace(node("a"), used_bytes=int(7.5 * 2**30))
    assert plan(replace(view, table=NodeTable((tight,)))).actions == ()


def test_a_lost_replica_keeps_its_version_if_the_new_one_fits_nowhere() -> None:
    now = deployment(replicas=2, context_length=9000)  # the model was made for 8192
    running = replica(1, of=BEFORE)
    view = observed(now, (running,), (A,), revisions=(revision(BEFORE, 1), revision(now, 2)))
    view = replace(view, stable_template=template_hash(BEFORE))
    decided = plan(view)
    assert [short(action) for action in decided.actions] == ["+qwen-0@a"]
    assert made_of(view) == 512
    assert decided.unschedulable is None
    assert decided.stuck is not None
    # One on a lost node moves as it was.
    lost = replica(0, of=BEFORE, on="gone", is_node_lost=True)
    view = replace(view, replicas=(lost, running), table=NodeTable((GONE, A)))
    assert [short(action) for action in plan(view).actions] == [">qwen-0@a"]
    assert made_of(view) == 512


def test_replicas_that_miss_room_do_not_block_others() -> None:
    decided = plan(observed(rolling(3), (old(0), old(1)), (FULL,)))
    assert [short(action) for action in decided.actions] == ["-qwen-0 OutdatedInPlace"]
    assert decided.unschedulable is not None


def test_both_limits_may_round_to_zero() -> None:
    view = observed(rolling(0, maxSurge="25%", maxUnavailable="25%"), (old(0),), (A,))
    assert [short(action) for action in plan(view).actions] == ["-qwen-0 ScaledDown"]


# Revisions.

BEFORE = deployment(replicas=2, context_length=512)


def test_a_new_version_is_saved_before_its_replicas_are_created() -> None:
    view = observed(deployment(), (), (A,), revisions=(revision(BEFORE),))
    assert [short(action) for action in plan(view).actions] == ["r2", "+qwen-0@a"]


def test_a_revision_keeps_why_it_came() -> None:
    view = observed(deployment(replicas=0, memory="3Gi"), (), (A,), revisions=(revision(BEFORE),))
    (saved,) = plan(view).actions
    assert isinstance(saved, SaveRevision)
    assert saved.cause == "contextLength 512 -> 1024, resources.memory none -> 3Gi"
    first, again = content_of(BEFORE), content_of(BEFORE).model_copy(update={"restarted_at": "T"})
    assert describe_difference(first, again) == "restarted at T"
    assert describe_difference(again, first) == "restart undone"
    noted = {CHANGE_CAUSE: "longer contexts"}
    metadata = BEFORE.metadata.model_copy(update={"annotations": noted})
    named = BEFORE.model_copy(update={"metadata": metadata})
    assert change_cause(named, None, None) == "longer contexts"
    assert change_cause(named, revision(deployment(), 1), None) == "longer contexts"


def with_cause(of: ModelDeployment, cause: str) -> ModelDeployment:
    metadata = of.metadata.model_copy(update={"annotations": {CHANGE_CAUSE: cause}})
    return of.model_copy(update={"metadata": metadata})


def saved_as(of: ModelDeployment, number: int, *, cause: str = "", annotated: str = "") -> Revision:
    """Return a revision with the recorded cause, and the annotation that was there when it was saved."""
    made = revision(of, number)
    notes = {CHANGE_CAUSE: annotated} if annotated else {}
    metadata = made.metadata.model_copy(update={"annotations": notes})
    spec = made.spec.model_copy(update={"change_cause": cause})
    return made.model_copy(update={"metadata": metadata, "spec": spec})


def test_an_annotation_that_was_there_before_is_no_cause() -> None:
    """The history after annotate, patch, `rollout undo`, and an edit (kubectl's annotate is per revision)."""
    noted = "longer context"
    model_deployment, two, three = (
        deployment(replicas=0, context_length=size) for size in (512, 1024, 2048)
    )
    first = saved_as(model_deployment, 1)
    second = saved_as(two, 2, cause=noted, annotated=noted)
    undone = with_cause(model_deployment, noted)
    (action,) = plan(observed(undone, (), (A,), revisions=(first, second))).actions
    assert isinstance(action, SaveRevision)
    assert (action.number, action.cause) == (3, "undo to revision 1")
    third = saved_as(model_deployment, 3, cause=action.cause, annotated=noted)
    edited = with_cause(three, noted)
    (action,) = plan(observed(edited, (), (A,), revisions=(second, third))).actions
    assert isinstance(action, SaveRevision)
    assert (action.number, action.cause) == (4, "contextLength 512 -> 2048")
    named_anew = with_cause(three, "even longer")
    (action,) = plan(observed(named_anew, (), (A,), revisions=(second, third))).actions
    assert isinstance(action, SaveRevision)
    assert action.cause == "even longer"
    # Back to a revision that had a cause of its own; the third one is of a release that recorded no annotation.
    older = saved_as(model_deployment, 3, cause=noted)
    back = with_cause(two, noted)
    (action,) = plan(observed(back, (), (A,), revisions=(second, older))).actions
    assert isinstance(action, SaveRevision)
    assert action.cause == f"undo to revision 2: {noted}"


def test_the_annotation_is_kept_with_the_revision() -> None:
    noted = with_cause(deployment(replicas=0), "faster")
    (action,) = plan(observed(noted, (), (A,), revisions=())).actions
    context = WriteContext(now=NOW, secret=lambda: "")
    write = make_write(action, noted, {}, context)
    (put,) = write.operations
    assert isinstance(put, Put)
    assert b'"kubernetes.io/change-cause":"faster"' in put.value.replace(b": ", b":")


def test_going_back_makes_an_earlier_version_the_newest() -> None:
    now = deployment(replicas=0)
    view = observed(now, (), (A,), revisions=(revision(now, 1), revision(BEFORE, 2)))
    assert [short(action) for action in plan(view).actions] == ["r3"]


def test_only_so_many_earlier_versions_are_kept() -> None:
    now = rolling(1, revisionHistoryLimit=1)
    versions = [deployment(context_length=100 + n) for n in range(3)]
    revisions = tuple(revision(one, n + 1) for n, one in enumerate(versions))
    view = observed(now, (replica(0),), (A,), revisions=(*revisions, revision(now, 4)))
    assert [short(action) for action in plan(view).actions] == [
        f"xr {revisions[0].name}",
        f"xr {revisions[1].name}",
    ]
    # A version that still runs can be rolled back to.
    running = replica(1, of=versions[0])
    view = replace(view, replicas=(replica(0), replace(running, is_ready=True)))
    removed = [short(action) for action in plan(view).actions if short(action).startswith("xr")]
    assert removed == [f"xr {revisions[1].name}"]


def test_revisions_go_with_their_deployment() -> None:
    view = observed(deployment(is_deleting=True), (), (A,), revisions=(revision(BEFORE),))
    assert [short(action) for action in plan(view).actions] == [
        f"xr {revision(BEFORE).name}",
        "Xqwen",
    ]


def test_revisions_of_an_earlier_deployment_of_the_name_go() -> None:
    stranger = revision(BEFORE)
    owner = stranger.metadata.owner_references[0].model_copy(update={"uid": "another"})
    metadata = stranger.metadata.model_copy(update={"owner_references": (owner,)})
    stranger = stranger.model_copy(update={"metadata": metadata})
    now = deployment(replicas=0)
    view = observed(now, (), (A,), revisions=(stranger, revision(now)))
    assert [short(action) for action in plan(view).actions] == [f"xr {stranger.name}"]


# Paused, and trials.


def stable(
    wanted: int, *replicas: ReplicaView, canary: CanaryStatus | None = None
) -> DeploymentView:
    """Return a fleet with the version BEFORE, whose deployment analyses another one."""
    steps = (CanaryStep(weight=10), CanaryStep(weight=60))
    now = deployment(replicas=wanted, rollout=Rollout(canary=Canary(steps=steps)))
    view = observed(now, replicas, (A, B), revisions=(revision(BEFORE, 1), revision(now, 2)))
    return replace(view, stable_template=template_hash(BEFORE), canary=canary)


def before(ordinal: int, *, on: str = "a", is_node_lost: bool = False) -> ReplicaView:
    return replica(ordinal, on=on, of=BEFORE, is_node_lost=is_node_lost, is_ready=not is_node_lost)


def trial(**changes: object) -> CanaryStatus:
    now = deployment(replicas=2)
    return CanaryStatus(template=template_hash(now), since=NOW).model_copy(update=changes)


def made_of(seen: DeploymentView, action_number: int = 0) -> int:
    """Return the context length of what an action makes: what tells the two versions apart."""
    action = plan(seen).actions[action_number]
    content = getattr(action, "content")  # noqa: B009 - only some actions make something
    return int(content.context_length)


def test_a_paused_rollout_creates_and_moves_the_old_version() -> None:
    now = deployment(replicas=2, rollout=Rollout(paused=True))
    lost = before(0, on="gone", is_node_lost=True)
    view = observed(now, (lost,), (GONE, A), revisions=(revision(BEFORE, 1), revision(now, 2)))
    view = replace(view, stable_template=template_hash(BEFORE))
    assert [short(action) for action in plan(view).actions] == [">qwen-0@a", "+qwen-1@a"]
    assert (made_of(view, 0), made_of(view, 1)) == (512, 512)


def test_a_canary_starts_besides_the_stable_replicas() -> None:
    view = stable(2, before(0), before(1))
    assert [short(action) for action in plan(view).actions] == ["+qwen-2@a"]
    assert made_of(view) == 1024


def test_a_running_canary_does_not_touch_the_stable_replicas() -> None:
    assert plan(stable(2, before(0), before(1), fresh(2), canary=trial(weight=10))).actions == ()


def test_a_later_step_gets_more_replicas() -> None:
    view = stable(2, before(0), before(1), fresh(2), canary=trial(step=1, weight=10))
    assert [short(action) for action in plan(view).actions] == ["+qwen-3@a"]


def test_a_trial_that_was_passed_rolls_on() -> None:
    passed = trial(step=2, weight=100, outcome="Passed")
    view = stable(2, before(0), before(1), fresh(2), canary=passed)
    assert [short(action) for action in plan(view).actions] == ["-qwen-0 Outdated"]


def test_a_trial_that_failed_is_rolled_back() -> None:
    failed = trial(outcome="Failed")
    view = stable(2, before(0), before(1), fresh(2), canary=failed)
    assert [short(action) for action in plan(view).actions] == ["-qwen-2 Outdated"]
    assert plan(stable(2, before(0), before(1), canary=failed)).actions == ()
    view = stable(2, before(0), canary=failed)
    assert [short(action) for action in plan(view).actions] == ["+qwen-1@a"]
    assert made_of(view) == 512


def test_a_trial_loses_a_node() -> None:
    lost = before(0, on="gone", is_node_lost=True)
    view = stable(2, lost, before(1), fresh(2), canary=trial(weight=10))
    view = replace(view, table=NodeTable((GONE, A, B)))
    assert [short(action) for action in plan(view).actions] == [">qwen-0@a"]
    assert made_of(view) == 512


def test_without_room_a_trial_takes_the_place_of_one() -> None:
    view = replace(stable(2, before(0), before(1)), table=NodeTable((FULL,)))
    assert [short(action) for action in plan(view).actions] == ["-qwen-0 OutdatedInPlace"]
    # Its place is the trial's, and the other stays alone for so long.
    view = stable(2, before(1))
    assert [short(action) for action in plan(view).actions] == ["+qwen-0@a"]
    assert made_of(view) == 1024
    assert plan(stable(2, before(1), fresh(0), canary=trial(weight=10))).actions == ()


def test_a_first_version_has_no_canary() -> None:
    view = replace(stable(2), stable_template="")
    assert [short(action) for action in plan(view).actions] == ["+qwen-0@a", "+qwen-1@b"]
