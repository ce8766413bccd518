"""Statuses: conditions, and times that change only with the truth of a condition."""

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from reconciler.deployments import status
from reconciler.deployments.autoscaling.autoscaler import ScalingDecision
from reconciler.deployments.observe import DeploymentView
from reconciler.deployments.placer import place_replica
from reconciler.deployments.rollout.canary import CanaryProgress
from reconciler.deployments.status import replica_status
from reconciler.placement.inputs import request_for
from reconciler.placement.refusals import Unschedulable
from schemas.deployment import ModelDeploymentStatus
from schemas.meta import (
    Condition,
    ConditionStatus,
    Status,
    find_condition,
    make_condition,
    stamp_conditions,
)
from schemas.replica import FetchStatus, RankStatus
from tests.support.reconciler_world import on
from tests.support.world import NOW, deployment, node, observed, replica

LATER = NOW + timedelta(seconds=5)


def get(found: Status, type_: str) -> Condition:
    condition = find_condition(found.conditions, type_)
    assert condition is not None
    return condition


def said(found: Status, type_: str) -> tuple[str, str, str]:
    condition = get(found, type_)
    return condition.status.value, condition.reason, condition.message


def unschedulable() -> Unschedulable:
    verdict = place_replica(request_for(deployment()), [node("small", memory_gib=1)])
    assert isinstance(verdict, Unschedulable)
    return verdict


def of_deployment(
    *replicas: object, wanted: int = 2, why: Unschedulable | None = None
) -> ModelDeploymentStatus:
    view = observed(deployment(replicas=wanted), replicas)  # type: ignore[arg-type]  # ReplicaViews
    return whole(view, why)


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


def test_all_is_well() -> None:
    made = of_deployment(replica(0), replica(1))
    assert said(made, "Available") == ("True", "AllReplicasReady", "2 of 2 replicas ready")
    assert said(made, "Placed") == ("True", "AllPlaced", "")
    assert (made.replicas, made.ready_replicas, made.observed_generation) == (2, 2, 1)
    assert made.concurrency == replica(0).replica.spec.concurrency > 0


def test_the_replica_with_the_fewest_requests_tells_what_limits_them() -> None:
    view = replica(0)
    spec = view.replica.spec
    memory = spec.ranks[0].memory.model_copy(update={"concurrency_limit": "GPUCores"})
    ranks = (spec.ranks[0].model_copy(update={"memory": memory}),)
    fewer = spec.model_copy(update={"concurrency": spec.concurrency - 1, "ranks": ranks})
    slow = replace(view, replica=view.replica.model_copy(update={"spec": fewer}))
    made = of_deployment(replica(1), slow)
    assert (made.concurrency, made.concurrency_limit) == (spec.concurrency - 1, "GPUCores")


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (3, "2 of 2 replicas ready, 1 more is serving"),
        (4, "2 of 2 replicas ready, 2 more are serving"),
    ],
)
def test_a_surge_is_not_counted_among_the_desired_replicas(count: int, message: str) -> None:
    made = of_deployment(*(replica(number) for number in range(count)))
    assert said(made, "Available") == ("True", "AllReplicasReady", message)
    assert made.ready_replicas == count


def test_scaled_to_zero_is_available() -> None:
    made = of_deployment(wanted=0)
    assert said(made, "Available") == ("True", "ScaledToZero", "0 of 0 replicas ready")


def test_autoscaling_says_why() -> None:
    decided = ScalingDecision(desired=2, reason="AtMaximum", message="more would be of use")
    view = replace(
        observed(deployment(replicas=1)),
        scaling=status.scaling_condition(decided),
        autoscaled_replicas=2,
    )
    made = whole(view)
    assert said(made, "Scaling") == ("True", "AtMaximum", "more would be of use")
    assert made.desired_replicas == 2
    unknown = status.scaling_condition(
        ScalingDecision(desired=2, reason="DemandUnknown", message="silent")
    )
    assert unknown.status is ConditionStatus.UNKNOWN


def test_starting() -> None:
    made = of_deployment(replica(0), replica(1, is_ready=False))
    assert said(made, "Available") == ("False", "ReplicasStarting", "1 of 2 replicas ready")


def test_placing() -> None:
    made = of_deployment(replica(0))
    assert said(made, "Placed") == ("False", "Placing", "1 of 2 replicas have a node")


def test_trouble_names_replica_node_and_words() -> None:
    made = of_deployment(
        replica(0), replace(replica(1, on="b", is_ready=False), problem="it ended")
    )
    assert said(made, "Available") == (
        "False",
        "ReplicaNotReady",
        "1 of 2 replicas ready; qwen-1 on b: it ended",
    )


def test_unschedulable_says_why_per_node() -> None:
    made = of_deployment(replica(0), why=unschedulable())
    line = "0/1 nodes fit: 1 too small even when empty (need 2.8 GiB, the largest has 1.0)"
    assert said(made, "Placed") == ("False", "Unschedulable", line)
    assert said(made, "Available")[1:] == ("Unschedulable", f"1 of 2 replicas ready; {line}")
    assert [(r.node, r.reason) for r in made.refusals] == [("small", "InsufficientMemory")]


def test_twenty_refusals_are_enough() -> None:
    verdict = place_replica(
        request_for(deployment()), [node(f"n{i}", is_ready=False) for i in range(50)]
    )
    assert isinstance(verdict, Unschedulable)
    assert len(of_deployment(why=verdict).refusals) == 20


def test_replicas_of_an_earlier_deployment_do_not_count() -> None:
    made = of_deployment(replace(replica(0), is_owned=False), replica(5), wanted=1)
    assert (made.replicas, made.ready_replicas) == (1, 1)


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
    truth = ConditionStatus.TRUE if holds else ConditionStatus.FALSE
    condition = Condition(type="Ready", status=truth, reason=reason, message="words")
    return RankStatus(replica_uid="uid-qwen-0", node="a", conditions=(condition,))


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
    assert said(made, "Ready") == wanted


def test_the_last_report_of_an_agent_that_is_away_does_not_count() -> None:
    view = replace(replica(0, is_ready=False), away_nodes=frozenset({"a"}))
    made = replica_status(view, [rank("WarmingUp", holds=False)], old=None, now=NOW)
    away = "its agent on a is away; the engine may still serve"
    assert said(made, "Ready") == ("False", "AgentAway", away)
    never = replica_status(view, [None], old=None, now=NOW)
    assert said(never, "Ready")[1] == "WaitingForAgent"


def test_a_replica_has_the_fetches_of_its_ranks_except_of_agents_that_are_away() -> None:
    fetch = FetchStatus(node="a", phase="Downloading", present_bytes=1, total_bytes=4)
    report = rank("Downloading", holds=False).model_copy(update={"fetch": fetch})
    view = replica(0, is_ready=False)
    assert replica_status(view, [report], old=None, now=NOW).fetches == (fetch,)
    away = replace(view, away_nodes=frozenset({"a"}))
    assert replica_status(away, [report], old=None, now=NOW).fetches == ()


def fetching(node: str, reason: str, *, holds: bool = False) -> RankStatus:
    truth = ConditionStatus.TRUE if holds else ConditionStatus.FALSE
    ready = Condition(
        type="Ready",
        status=ConditionStatus.FALSE,
        reason="WaitingForFiles" if holds else reason,
        message=f"{reason} words",
    )
    present = ready.model_copy(update={"type": "ModelPresent", "status": truth, "reason": reason})
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
    assert said(made, "Ready") == ready
    if present is None:
        assert find_condition(made.conditions, "ModelPresent") is None
    else:
        assert said(made, "ModelPresent") == present


def test_the_priorities_of_the_macs_with_replicas_are_told_to_gateways() -> None:
    priorities = {"a": 80, "b": 0, "c": 100}
    nodes = tuple(replace(node(name), pool_priority=pool) for name, pool in priorities.items())
    view = observed(deployment(), (replica(0), replica(1, on="b")), nodes)
    assert whole(view).node_priorities == {"a": 80}
