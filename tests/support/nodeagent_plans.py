"""Replicas and plans for tests of the agent's planner."""

from datetime import UTC, datetime
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from nodeagent.actions import Action, ReportRank, StopEngine
from nodeagent.plan import plan
from nodeagent.replicas.observation import EpochEnd, ObservedReplica
from schemas.deployment import ModelSource
from schemas.formation import GoldenAnswer
from schemas.meta import Condition, ConditionStatus, ObjectMeta
from schemas.replica import MemoryProof, RankAssignment, RankStatus, Replica, ReplicaSpec

NOW = datetime(2026, 1, 1, tzinfo=UTC)


PROOF = MemoryProof(weights_bytes=1, kv_cache_bytes=1, activation_bytes=1, overhead_bytes=1)


def wanted(*, uid: str = "u1", node: str = "a", is_deleting: bool = False) -> Replica:
    return Replica(
        metadata=ObjectMeta(
            name="qwen-0", uid=uid, deletion_timestamp=NOW if is_deleting else None
        ),
        spec=ReplicaSpec(
            deployment="qwen",
            template="t",
            model=ModelSource(path="qwen"),
            served_names=("qwen",),
            context_length=16,
            concurrency=1,
            ranks=(RankAssignment(node=node, memory=PROOF),),
        ),
    )


def short(action: Action) -> str:
    """Return an action in a word, a report as what it says of Ready or Stopped."""
    match action:
        case ReportRank(conditions=conditions):
            said = conditions[-1]
            return f"{said.type}={said.status.value} {said.reason}"
        case StopEngine(kill=True):
            return "Kill"
        case _:
            return type(action).__name__


def planned(state: ObservedReplica) -> tuple[str, float | None]:
    """Return the planned actions in words, and the seconds until the next look."""
    step = plan(state)
    return ", ".join(map(short, step.actions)), step.requeue_after_s


def case(
    name: str, state: ObservedReplica, actions: str, after_s: float | None = 0.1
) -> ParameterSet:
    """Return a row of a table of situations."""
    return pytest.param(state, (actions, after_s), id=name)


OTHER_ANSWER = GoldenAnswer(pieces=("a", "c"), logprobs=(-0.5, -1.0))


RANK_ENDED = EpochEnd(reason="RankEnded", message="its rank ended with 4: rank 1 is gone")


def rank_status(conditions: tuple[Condition, ...], *, epoch: int = 2, **fields: Any) -> RankStatus:
    return RankStatus(replica_uid="u1", node="a", epoch=epoch, conditions=conditions, **fields)


def epoch_over_status() -> RankStatus:
    reason, message = RANK_ENDED.reason, RANK_ENDED.message
    return rank_status(
        (
            Condition(type="Ready", status=ConditionStatus.FALSE, reason=reason, message=message),
            Condition(
                type="EpochOver", status=ConditionStatus.TRUE, reason=reason, message=message
            ),
        )
    )
