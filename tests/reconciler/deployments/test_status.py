"""Statuses: conditions, and times that change only with the truth of a condition."""

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from reconciler.deployments import status
from reconciler.deployments.autoscaling.autoscaler import ScalingDecision
from reconciler.deployments.observe import DeploymentView, ReplicaView
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
from tests.support.reconciler_world import on, unplaced
from tests.support.world import (
    NOW,
    condition,
    condition_of,
    deployment,
    node,
    observed,
    replica,
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
    line = "0/1 nodes fit: 1 too small even when empty (need 2.8 GiB, the largest has 1.0)"
    assert condition_of(made, "Placed") == ("False", "Unschedulable", line)
    assert condition_of(made, "Available")[1:] == (
        "Unschedulable",
        f"1 of 2 replicas ready; {line}",
    )
    assert [(r.node, r.reason) for r in made.refusals] == [("small", "InsufficientMemory")]


def test_twenty_refusals_are_enough() -> None:
    verdict = unplaced(
        request_for(deployment()), *(node(f"n{i}", is_ready=False) for i in range(50))
    )
    assert len(of_deployment(why=verdict).refusals) == 20


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
