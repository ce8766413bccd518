"""The condition Progressing, and the rollout's part of a status."""

from dataclasses import replace
from datetime import datetime, timedelta

from reconciler.deployments import status
from reconciler.deployments.observe import DeploymentView, ReplicaView
from reconciler.deployments.rollout.canary import CanaryProgress
from reconciler.deployments.rollout.revisions import template_hash
from reconciler.placement.refusals import RefusalCount, Unschedulable
from schemas.deployment import CanaryStatus, ModelDeployment, ModelDeploymentStatus
from schemas.meta import ENDED_BECAUSE, find_condition
from schemas.rollout import Canary, CanaryStep, Rollout
from tests.support.world import (
    NOW,
    condition_of,
    deployment,
    node,
    observed,
    replica,
    revision,
    with_metadata,
)

BEFORE = deployment(replicas=2, context_length=512)
WANTED = deployment(replicas=2)
NO_ROOM = Unschedulable(
    nodes=1, tallies=(RefusalCount(reason="NodeCordoned", count=1),), refusals=(), fitting=0
)


def after(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def seen(
    *replicas: ReplicaView, of: ModelDeployment = WANTED, canary: CanaryStatus | None = None
) -> DeploymentView:
    view = observed(of, replicas, (node("a"),), revisions=(revision(BEFORE, 1), revision(of, 2)))
    return replace(view, stable_template=template_hash(BEFORE), canary=canary)


def look(
    found: DeploymentView,
    old: ModelDeploymentStatus | None = None,
    *,
    now: datetime = NOW,
    why: Unschedulable | None = None,
) -> ModelDeploymentStatus:
    canary = CanaryProgress(status=found.canary)
    moved = status.compute_progress(found, why, canary=canary, old=old, now=now)
    return status.deployment_status(found, why, moved, old=old, now=now)


def said(status: ModelDeploymentStatus, type_: str = "Progressing") -> tuple[str, str, str]:
    return condition_of(status, type_)


def old(ordinal: int) -> ReplicaView:
    return replica(ordinal, of=BEFORE)


def test_a_running_rollout_shows_its_progress() -> None:
    made = look(seen(old(0), old(1), replica(2, is_ready=False)))
    assert said(made) == (
        "True",
        "RollingOut",
        "0 of 2 replicas of revision 2 are ready, 2 of earlier ones are still there",
    )
    assert (made.replicas, made.updated_replicas, made.ready_replicas) == (3, 1, 2)
    assert (made.revision, made.stable_template) == (2, "")
    made = look(seen(old(1), replica(2)))
    assert said(made)[2].endswith("revision 2 are ready, 1 of earlier ones is still there")


def test_a_completed_rollout_becomes_the_stable_version() -> None:
    made = look(seen(replica(0), replica(2)))
    assert said(made) == ("True", "RolloutComplete", "every replica runs revision 2")
    assert made.stable_template == template_hash(WANTED)


def test_an_engine_that_dies_later_undoes_no_rollout() -> None:
    done = look(seen(replica(0), replica(2)))
    made = look(seen(replica(0), replica(2, is_ready=False)), done, now=after(10_000))
    assert said(made)[1] == "RolloutComplete"


def test_without_progress_it_stalls_and_says_why() -> None:
    troubled = replace(replica(2, is_ready=False), problem="no config.json in /models/qwen")
    first = look(seen(old(0), old(1), troubled))
    waits = look(seen(old(0), old(1), troubled), first, now=after(599))
    assert said(waits)[1] == "RollingOut"
    stalled = look(seen(old(0), old(1), troubled), waits, now=after(600))
    assert said(stalled) == (
        "False",
        "Stalled",
        "no progress for 10m (progressDeadline): qwen-2 on a: no config.json in /models/qwen",
    )
    # Once something moves again it goes on.
    assert said(look(seen(old(1), replica(2)), stalled, now=after(601)))[1] == "RollingOut"


def test_an_unplaced_replica_stalls_with_a_reason() -> None:
    first = look(seen(replica(0)), why=NO_ROOM)
    stalled = look(seen(replica(0)), first, now=after(700), why=NO_ROOM)
    assert said(stalled)[2].endswith("(progressDeadline): 0/1 nodes fit: 1 cordoned")


def test_the_deadline_requeues() -> None:
    first = look(seen(old(0), old(1)))
    view = seen(old(0), old(1))
    moved = status.compute_progress(view, None, canary=CanaryProgress(), old=first, now=after(100))
    assert moved.requeue_after_s == 500


def test_paused() -> None:
    of = deployment(replicas=2, rollout=Rollout(paused=True))
    made = look(seen(old(0), replica(1), of=of))
    assert said(made) == (
        "Unknown",
        "Paused",
        "spec.rollout.paused is true; 1 of 2 replicas run revision 2",
    )


TRIED = deployment(replicas=2, rollout=Rollout(canary=Canary(steps=(CanaryStep(weight=10),))))


def trial(**changes: object) -> CanaryStatus:
    canary_status = CanaryStatus(template=template_hash(TRIED), since=NOW, message="step 1 of 1")
    return canary_status.model_copy(update=changes)


def test_a_running_canary() -> None:
    made = look(seen(old(0), old(1), replica(2, of=TRIED), of=TRIED, canary=trial(weight=10)))
    assert said(made) == ("True", "CanaryRunning", "step 1 of 1")
    assert made.canary == trial(weight=10)


def test_a_trial_that_waits_on_purpose_does_not_stall() -> None:
    view = seen(old(0), old(1), replica(2, of=TRIED), of=TRIED, canary=trial(weight=10))
    first = look(view)
    assert said(look(view, first, now=after(7200)))[1] == "CanaryRunning"
    # But a rollout without its replicas does.
    view = seen(old(0), old(1), replica(2, of=TRIED, is_ready=False), of=TRIED, canary=trial())
    first = look(view)
    assert said(look(view, first, now=after(7200)))[1] == "Stalled"


def test_an_obstacle_is_reported_at_once() -> None:
    made = look(seen(old(0), old(1)), why=NO_ROOM)
    assert said(made)[1:] == (
        "RollingOut",
        "0 of 2 replicas of revision 2 are ready, 2 of earlier ones are still there; "
        "0/1 nodes fit: 1 cordoned",
    )


def test_a_failed_canary_names_the_running_revision() -> None:
    failed = trial(outcome="Failed", message="40.0% of the requests failed, 5% is allowed")
    made = look(seen(old(0), old(1), of=TRIED, canary=failed))
    assert said(made) == (
        "False",
        "CanaryFailed",
        "40.0% of the requests failed, 5% is allowed; replicas run revision 1 again",
    )


def test_the_condition_preempted_names_the_winner_until_all_are_placed() -> None:
    victim = replica(1, is_deleting=True)
    note = {ENDED_BECAUSE: "Preempted: big-0 has priority 9, qwen-1 has 0"}
    victim = replace(victim, replica=with_metadata(victim.replica, annotations=note))
    first = look(seen(replica(0), victim))
    assert said(first, "Preempted") == (
        "True",
        "HigherPriority",
        "big-0 has priority 9, qwen-1 has 0",
    )
    gone = look(seen(replica(0)), first, now=after(1))
    assert said(gone, "Preempted") == said(first, "Preempted")
    whole = look(seen(replica(0), replica(1)), gone, now=after(2))
    assert said(whole, "Preempted") == ("False", "NotPreempted", "")
    assert find_condition(look(seen(replica(0))).conditions, "Preempted") is None
