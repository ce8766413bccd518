"""Statuses: conditions, times that change only with the truth of a condition, and the progress of rollouts."""

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from reconciler.deployments import status
from reconciler.deployments.autoscaling.autoscaler import ScalingDecision
from reconciler.deployments.observe import DeploymentView, ReplicaView
from reconciler.deployments.rollout.canary import CanaryProgress
from reconciler.deployments.rollout.revisions import template_hash
from reconciler.deployments.status import replica_status
from reconciler.placement.inputs import request_for
from reconciler.placement.refusals import RefusalCount, Unschedulable
from reconciler.placement.swap import LoadWait
from schemas.autoscaling import LoadForecast
from schemas.deployment import (
    CanaryStatus,
    ModelDeployment,
    ModelDeploymentStatus,
)
from schemas.meta import (
    ENDED_BECAUSE,
    Condition,
    ConditionStatus,
    Status,
    find_condition,
    make_condition,
    stamp_conditions,
)
from schemas.replica import FetchStatus, RankStatus
from schemas.rollout import Canary, CanaryStep, Rollout
from tests.support.reconciler_world import on, unplaced
from tests.support.world import (
    NOW,
    condition,
    condition_of,
    deployment,
    node,
    observed,
    replica,
    revision,
    with_metadata,
    with_spec,
)

LATER = NOW + timedelta(seconds=5)
SMALL = unplaced(request_for(deployment()), node("small", memory_gib=1))


def of_deployment(
    *replicas: ReplicaView, wanted: int = 2, why: Unschedulable | None = None
) -> ModelDeploymentStatus:
    return whole(observed(deployment(replicas=wanted), replicas), why)


def whole(
    seen: DeploymentView,
    why: Unschedulable | None = None,
    *,
    old: ModelDeploymentStatus | None = None,
    now: datetime = NOW,
) -> ModelDeploymentStatus:
    canary = CanaryProgress(status=seen.canary)
    moved = status.compute_progress(seen, why, canary=canary, old=old, now=now)
    return status.deployment_status(seen, why, moved, old=old, now=now)


TROUBLED = replace(replica(1, on="b", is_ready=False), problem="it ended")
AVAILABLE = [
    pytest.param(2, (replica(0), replica(1)), ("True", "AllReplicasReady", "2 of 2 replicas ready"), id="all-is-well"),
    pytest.param(2, tuple(map(replica, range(3))), ("True", "AllReplicasReady", "2 of 2 replicas ready, 1 more is serving"), id="surge"),
    pytest.param(2, tuple(map(replica, range(4))), ("True", "AllReplicasReady", "2 of 2 replicas ready, 2 more are serving"), id="surges"),
    pytest.param(0, (), ("True", "ScaledToZero", "0 of 0 replicas ready"), id="scaled-to-zero"),
    pytest.param(2, (replica(0), replica(1, is_ready=False)), ("False", "ReplicasStarting", "1 of 2 replicas ready"), id="starting"),
    pytest.param(
        2, (replica(0), TROUBLED), ("False", "ReplicaNotReady", "1 of 2 replicas ready; qwen-1 on b: it ended"), id="in-trouble",
    ),
    pytest.param(
        1, (replace(replica(0), is_owned=False), replica(5)), ("True", "AllReplicasReady", "1 of 1 replicas ready"),
        id="replicas-of-an-earlier-deployment-do-not-count",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("wanted", "replicas", "expected"), AVAILABLE)
def test_available(
    wanted: int, replicas: tuple[ReplicaView, ...], expected: tuple[str, str, str]
) -> None:
    made = of_deployment(*replicas, wanted=wanted)
    assert condition_of(made, "Available") == expected
    owned = [view for view in replicas if view.is_owned]
    assert (made.replicas, made.observed_generation) == (len(owned), 1)
    assert made.ready_replicas == sum(view.is_ready for view in owned)


def test_placed() -> None:
    made = of_deployment(replica(0), replica(1))
    assert condition_of(made, "Placed") == ("True", "AllPlaced", "")
    assert made.concurrency == replica(0).replica.spec.concurrency > 0
    made = of_deployment(replica(0))
    assert condition_of(made, "Placed") == ("False", "Placing", "1 of 2 replicas have a node")


def test_the_replica_with_the_fewest_requests_tells_what_limits_them() -> None:
    view = replica(0)
    spec = view.replica.spec
    memory = spec.ranks[0].memory.model_copy(update={"concurrency_limit": "GPUCores"})
    ranks = (spec.ranks[0].model_copy(update={"memory": memory}),)
    fewer = with_spec(view.replica, concurrency=spec.concurrency - 1, ranks=ranks)
    slow = replace(view, replica=fewer)
    made = of_deployment(replica(1), slow)
    assert (made.concurrency, made.concurrency_limit) == (spec.concurrency - 1, "GPUCores")


def test_autoscaling_says_why() -> None:
    decided = ScalingDecision(desired=2, reason="AtMaximum", message="more would be of use")
    view = replace(
        observed(deployment(replicas=1)),
        scaling=status.scaling_condition(decided),
        autoscaled_replicas=2,
    )
    made = whole(view)
    assert condition_of(made, "Scaling") == ("True", "AtMaximum", "more would be of use")
    assert made.desired_replicas == 2
    unknown = status.scaling_condition(
        ScalingDecision(desired=2, reason="DemandUnknown", message="silent")
    )
    assert unknown.status is ConditionStatus.UNKNOWN


def test_unschedulable_says_why_per_node() -> None:
    made = of_deployment(replica(0), why=SMALL)
    line = "0/1 nodes fit: 1 too small even when empty (need 2.8 GiB, the largest has 1.0 GiB)"
    assert condition_of(made, "Placed") == ("False", "Unschedulable", line)
    assert condition_of(made, "Available")[1:] == (
        "Unschedulable",
        f"1 of 2 replicas ready; {line}",
    )
    assert [(r.node, r.reason) for r in made.refusals] == [("small", "InsufficientMemory")]


def test_the_wait_for_the_first_replica_is_told_and_changes_only_by_more_than_people_notice() -> (
    None
):
    def told(
        *replicas: ReplicaView, why: Unschedulable | None, old: LoadForecast | None, after_s: float
    ) -> LoadForecast | None:
        seen = observed(deployment(replicas=1), replicas)
        before = ModelDeploymentStatus(loading=old)
        return whole(seen, why, old=before, now=NOW + timedelta(seconds=after_s)).loading

    waits = SMALL.noting("x", LoadWait(seconds=14, gives_way=("phi-0",)))
    first = told(why=waits, old=None, after_s=0)
    assert first is not None
    assert first.text(NOW) == "loads in 14 s: phi-0 gives way"
    assert first.text(NOW + timedelta(seconds=5)) == "loads in 9 s: phi-0 gives way"
    assert first.text(NOW - timedelta(hours=1)) == "loads in 14 s: phi-0 gives way", "other clocks"
    assert first.text(NOW + timedelta(hours=1), "loading") == "loading: phi-0 gives way"
    assert told(why=waits, old=first, after_s=2) is first
    later = told(why=waits, old=first, after_s=9)
    assert later is not None
    assert later.since == NOW + timedelta(seconds=9)

    began = NOW + timedelta(seconds=10)
    loading = replace(replica(0, is_ready=False), loads_since=began)
    load = told(loading, why=None, old=later, after_s=12)
    assert load is not None
    assert (load.since, load.gives_way) == (began, ())
    assert told(loading, why=None, old=load, after_s=20) is load, "it comes no later by itself"
    fetch = FetchStatus(
        node="a", phase="Downloading", present_bytes=1, total_bytes=9, eta_seconds=100
    )
    fetches = told(replace(loading, fetch=fetch), why=None, old=load, after_s=12)
    assert fetches is not None
    assert fetches.seconds == 100 + load.seconds
    still = fetch.model_copy(update={"eta_seconds": None})
    assert told(replace(loading, fetch=still), why=None, old=load, after_s=12) is None
    assert told(replica(0), why=None, old=load, after_s=30) is None, "it serves"


@pytest.mark.parametrize(
    ("before", "after", "moves"), [(True, True, False), (False, False, False), (True, False, True)]
)
def test_times_move_only_with_the_truth(*, before: bool, after: bool, moves: bool) -> None:
    old = Status(
        conditions=stamp_conditions(
            None, [make_condition("Ready", "Old", "old", holds=before)], generation=1, now=NOW
        )
    )
    fresh = make_condition("Ready", "New", "new", holds=after)
    (made,) = stamp_conditions(old, [fresh], generation=2, now=LATER)
    assert (made.reason, made.message, made.observed_generation) == ("New", "new", 2)
    assert made.last_transition_time == (LATER if moves else NOW)


def test_a_condition_that_is_no_longer_computed_is_removed() -> None:
    old = Status(conditions=(Condition(type="Gone", status=ConditionStatus.TRUE, reason="X"),))
    assert [c.type for c in stamp_conditions(old, [], generation=1, now=NOW)] == []


def test_a_repeated_computation_changes_nothing() -> None:
    view = observed(deployment(), (replica(0),))
    first = whole(view)
    assert whole(view, old=first, now=LATER) == first


def rank(reason: str, *, holds: bool) -> RankStatus:
    said = condition("Ready", reason, "words", holds=holds)
    return RankStatus(replica_uid="uid-qwen-0", node="a", conditions=(said,))


@pytest.mark.parametrize(
    ("found", "is_serving", "wanted"),
    [
        (None, True, ("True", "Serving", "")),
        (rank("Loading", holds=False), True, ("True", "Serving", "")),
        (rank("Loading", holds=False), False, ("False", "Loading", "words")),
        (None, False, ("False", "WaitingForAgent", "its agent has not reported yet")),
        # The agent reports that it serves, but its lease has expired.
        (rank("Serving", holds=True), False, ("False", "AgentAway", "its agent on a is away; the engine may still serve")),
    ],
)  # fmt: skip
def test_replica(
    found: RankStatus | None, *, is_serving: bool, wanted: tuple[str, str, str]
) -> None:
    view = replica(0, is_ready=is_serving)
    made = replica_status(view, [found], old=None, now=NOW)
    assert condition_of(made, "Ready") == wanted


def test_the_last_report_of_an_agent_that_is_away_does_not_count() -> None:
    view = replace(replica(0, is_ready=False), away_nodes=frozenset({"a"}))
    made = replica_status(view, [rank("WarmingUp", holds=False)], old=None, now=NOW)
    away = "its agent on a is away; the engine may still serve"
    assert condition_of(made, "Ready") == ("False", "AgentAway", away)
    never = replica_status(view, [None], old=None, now=NOW)
    assert condition_of(never, "Ready")[1] == "WaitingForAgent"


def test_a_replica_has_the_fetches_of_its_ranks_except_of_agents_that_are_away() -> None:
    fetch = FetchStatus(node="a", phase="Downloading", present_bytes=1, total_bytes=4)
    report = rank("Downloading", holds=False).model_copy(update={"fetch": fetch})
    view = replica(0, is_ready=False)
    assert replica_status(view, [report], old=None, now=NOW).fetches == (fetch,)
    away = replace(view, away_nodes=frozenset({"a"}))
    assert replica_status(away, [report], old=None, now=NOW).fetches == ()


def fetching(node: str, reason: str, *, holds: bool = False) -> RankStatus:
    message = f"{reason} words"
    ready = condition("Ready", "WaitingForFiles" if holds else reason, message, holds=False)
    present = condition("ModelPresent", reason, message, holds=holds)
    return RankStatus(replica_uid="u", node=node, epoch=1, conditions=(ready, present))


@pytest.mark.parametrize(
    ("reports", "ready", "present"),
    [
        pytest.param(
            (fetching("a", "Present", holds=True), fetching("b", "NoSpace")), ("False", "NoSpace", "rank 1 on b: NoSpace words"),
            ("False", "NoSpace", "rank 1 on b: NoSpace words"), id="a failure comes before a rank that waits",
        ),
        pytest.param(
            (fetching("a", "Downloading"), fetching("b", "Gated")), ("False", "Gated", "rank 1 on b: Gated words"),
            ("False", "Gated", "rank 1 on b: Gated words"), id="a failure comes before a fetch",
        ),
        pytest.param(
            (fetching("a", "Present", holds=True), fetching("b", "Downloading")),
            ("False", "Downloading", "rank 1 on b: Downloading words"),
            ("False", "Downloading", "rank 1 on b: Downloading words"), id="a fetch comes before a rank that waits",
        ),
        pytest.param(
            (fetching("a", "Present", holds=True), None), ("False", "WaitingForFiles", "rank 0 on a: Present words"), None,
            id="not present before all have reported",
        ),
        pytest.param(
            (fetching("a", "Present", holds=True), fetching("b", "Present", holds=True)),
            ("False", "WaitingForFiles", "rank 0 on a: Present words"), ("True", "Present", "Present words"),
            id="all have their files",
        ),
    ],
)  # fmt: skip
def test_a_group_shows_the_rank_that_keeps_it_from_starting(
    reports: tuple[RankStatus | None, ...],
    ready: tuple[str, str, str],
    present: tuple[str, str, str] | None,
) -> None:
    view = replace(on("ab", awaits_files=True), is_ready=False)
    made = replica_status(view, reports, old=None, now=NOW)
    assert condition_of(made, "Ready") == ready
    if present is None:
        assert find_condition(made.conditions, "ModelPresent") is None
    else:
        assert condition_of(made, "ModelPresent") == present


def test_the_priorities_of_the_macs_with_replicas_are_told_to_gateways() -> None:
    priorities = {"a": 80, "b": 0, "c": 100}
    nodes = tuple(replace(node(name), pool_priority=pool) for name, pool in priorities.items())
    view = observed(deployment(), (replica(0), replica(1, on="b")), nodes)
    assert whole(view).node_priorities == {"a": 80}


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


def old(ordinal: int) -> ReplicaView:
    return replica(ordinal, of=BEFORE)


def test_a_running_rollout_shows_its_progress() -> None:
    made = whole(seen(old(0), old(1), replica(2, is_ready=False)))
    assert condition_of(made, "Progressing") == (
        "True",
        "RollingOut",
        "0 of 2 replicas of revision 2 are ready, 2 of earlier ones are still there",
    )
    assert (made.replicas, made.updated_replicas, made.ready_replicas) == (3, 1, 2)
    assert (made.revision, made.stable_template) == (2, "")
    made = whole(seen(old(1), replica(2)))
    assert condition_of(made, "Progressing")[2].endswith(
        "revision 2 are ready, 1 of earlier ones is still there"
    )


def test_a_completed_rollout_becomes_the_stable_version() -> None:
    made = whole(seen(replica(0), replica(2)))
    assert condition_of(made, "Progressing") == (
        "True",
        "RolloutComplete",
        "every replica runs revision 2",
    )
    assert made.stable_template == template_hash(WANTED)


def test_an_engine_that_dies_later_undoes_no_rollout() -> None:
    done = whole(seen(replica(0), replica(2)))
    made = whole(seen(replica(0), replica(2, is_ready=False)), old=done, now=after(10_000))
    assert condition_of(made, "Progressing")[1] == "RolloutComplete"


def test_without_progress_it_stalls_and_says_why() -> None:
    troubled = replace(replica(2, is_ready=False), problem="no config.json in /models/qwen")
    first = whole(seen(old(0), old(1), troubled))
    waits = whole(seen(old(0), old(1), troubled), old=first, now=after(599))
    assert condition_of(waits, "Progressing")[1] == "RollingOut"
    stalled = whole(seen(old(0), old(1), troubled), old=waits, now=after(600))
    assert condition_of(stalled, "Progressing") == (
        "False",
        "Stalled",
        "no progress for 10m (progressDeadline): qwen-2 on a: no config.json in /models/qwen",
    )
    # Once something moves again it goes on.
    assert (
        condition_of(whole(seen(old(1), replica(2)), old=stalled, now=after(601)), "Progressing")[1]
        == "RollingOut"
    )


def test_an_unplaced_replica_stalls_with_a_reason() -> None:
    first = whole(seen(replica(0)), NO_ROOM)
    stalled = whole(seen(replica(0)), old=first, now=after(700), why=NO_ROOM)
    assert condition_of(stalled, "Progressing")[2].endswith(
        "(progressDeadline): 0/1 nodes fit: 1 cordoned"
    )


def test_the_deadline_requeues() -> None:
    first = whole(seen(old(0), old(1)))
    view = seen(old(0), old(1))
    moved = status.compute_progress(view, None, canary=CanaryProgress(), old=first, now=after(100))
    assert moved.requeue_after_s == 500


def test_paused() -> None:
    of = deployment(replicas=2, rollout=Rollout(paused=True))
    made = whole(seen(old(0), replica(1), of=of))
    assert condition_of(made, "Progressing") == (
        "Unknown",
        "Paused",
        "spec.rollout.paused is true; 1 of 2 replicas run revision 2",
    )


TRIED = deployment(replicas=2, rollout=Rollout(canary=Canary(steps=(CanaryStep(weight=10),))))


def trial(**changes: object) -> CanaryStatus:
    canary_status = CanaryStatus(template=template_hash(TRIED), since=NOW, message="step 1 of 1")
    return canary_status.model_copy(update=changes)


def test_a_running_canary() -> None:
    made = whole(seen(old(0), old(1), replica(2, of=TRIED), of=TRIED, canary=trial(weight=10)))
    assert condition_of(made, "Progressing") == ("True", "CanaryRunning", "step 1 of 1")
    assert made.canary == trial(weight=10)


def test_a_trial_that_waits_on_purpose_does_not_stall() -> None:
    view = seen(old(0), old(1), replica(2, of=TRIED), of=TRIED, canary=trial(weight=10))
    first = whole(view)
    assert (
        condition_of(whole(view, old=first, now=after(7200)), "Progressing")[1] == "CanaryRunning"
    )
    # But a rollout without its replicas does.
    view = seen(old(0), old(1), replica(2, of=TRIED, is_ready=False), of=TRIED, canary=trial())
    first = whole(view)
    assert condition_of(whole(view, old=first, now=after(7200)), "Progressing")[1] == "Stalled"


def test_an_obstacle_is_reported_at_once() -> None:
    made = whole(seen(old(0), old(1)), why=NO_ROOM)
    assert condition_of(made, "Progressing")[1:] == (
        "RollingOut",
        "0 of 2 replicas of revision 2 are ready, 2 of earlier ones are still there; "
        "0/1 nodes fit: 1 cordoned",
    )


def test_a_failed_canary_names_the_running_revision() -> None:
    failed = trial(outcome="Failed", message="40.0% of the requests failed, 5% is allowed")
    made = whole(seen(old(0), old(1), of=TRIED, canary=failed))
    assert condition_of(made, "Progressing") == (
        "False",
        "CanaryFailed",
        "40.0% of the requests failed, 5% is allowed; replicas run revision 1 again",
    )


def test_the_condition_preempted_names_the_winner_until_all_are_placed() -> None:
    victim = replica(1, is_deleting=True)
    note = {ENDED_BECAUSE: "Preempted: big-0 has priority 9, qwen-1 has 0"}
    victim = replace(victim, replica=with_metadata(victim.replica, annotations=note))
    first = whole(seen(replica(0), victim))
    assert condition_of(first, "Preempted") == (
        "True",
        "HigherPriority",
        "big-0 has priority 9, qwen-1 has 0",
    )
    gone = whole(seen(replica(0)), old=first, now=after(1))
    assert condition_of(gone, "Preempted") == condition_of(first, "Preempted")
    placed = whole(seen(replica(0), replica(1)), old=gone, now=after(2))
    assert condition_of(placed, "Preempted") == ("False", "NotPreempted", "")
    assert find_condition(whole(seen(replica(0))).conditions, "Preempted") is None
