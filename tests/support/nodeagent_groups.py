"""Replicas with groups for tests of the agent."""

from datetime import UTC, datetime
from typing import Any

from schemas.deployment import ModelSource
from schemas.formation import Formation, GoldenAnswer
from schemas.meta import ObjectMeta
from schemas.replica import LeavingRank, MemoryProof, RankAssignment, Replica, ReplicaSpec

NOW = datetime(2026, 1, 1, tzinfo=UTC)
PROOF = MemoryProof(weights_bytes=2**30, kv_cache_bytes=0, activation_bytes=0, overhead_bytes=0)
GOLDEN = GoldenAnswer(pieces=("a", "b"), logprobs=(-0.5, -1.0))


def formation(**fields: Any) -> Formation:
    return Formation(group="g", formed_at=NOW).model_copy(update=fields)


def group(
    *nodes: str,
    uid: str = "u1",
    name: str = "qwen-0",
    is_deleting: bool = False,
    leaving: tuple[LeavingRank, ...] = (),
    **fields: Any,
) -> Replica:
    """Return a replica with a rank on each node; `fields` are the formation's."""
    ranks = tuple(
        RankAssignment(node=node, addresses=(f"10.0.0.{number}",), memory=PROOF, layers=number + 1)
        for number, node in enumerate(nodes or ("a", "b"), 1)
    )
    return Replica(
        metadata=ObjectMeta(name=name, uid=uid, deletion_timestamp=NOW if is_deleting else None),
        spec=ReplicaSpec(
            deployment="qwen",
            template="t",
            model=ModelSource(path="qwen"),
            served_names=("qwen",),
            context_length=64,
            concurrency=1,
            ranks=ranks,
            formation=formation(**fields),
            leaving=leaving,
        ),
    )
