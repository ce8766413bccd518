"""Replicas and plans for tests of the agent's planner."""

from datetime import UTC, datetime
from typing import Any

from nodeagent.actions import (
    Action,
    ReportRank,
    StopEngine,
)
from nodeagent.replicas.observation import (
    EpochEnd,
)
from schemas.deployment import ModelSource
from schemas.formation import GoldenAnswer
from schemas.meta import Condition, ConditionStatus, ObjectMeta
from schemas.replica import MemoryProof, RankAssignment, RankStatus, Replica, ReplicaSpec

NOW = datetime(2026, 1, 1, tzinfo=UTC)


PROOF = MemoryProof(weights_bytes=1, kv_cache_bytes=1, activation_bytes=1, overhead_bytes=1)


def wanted(*, uid: str = "u1", is_deleting: bool = False) -> Replica:
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
            ranks=(RankAssignment(node="a", memory=PROOF),),
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
