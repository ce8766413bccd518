"""Writes of broken objects, for tests of what is wrong with a fleet and what mends it."""

from collections.abc import Sequence
from datetime import UTC, datetime

from schemas.deployment import ModelDeploymentStatus, NodeRefusal
from schemas.formation import Formation
from schemas.meta import Condition, ConditionStatus, ObjectMeta
from schemas.node import NodeLifeStatus
from schemas.replica import MemoryProof, RankAssignment, Replica, ReplicaSpec, ReplicaStatus
from store import codec, keys
from store.port import Put
from tests.support.gateway_world import deployment
from tests.support.macs import put_status

LEADER = Put(key=keys.ELECTION_RECONCILER, value=b"mac-1/7 1.0")


def condition(
    type_: str, reason: str, message: str = "", status: ConditionStatus = ConditionStatus.FALSE
) -> Condition:
    return Condition(type=type_, status=status, reason=reason, message=message)


def put_deployment(
    name: str,
    *conditions: Condition,
    ready: int = 0,
    desired: int = 1,
    refusals: Sequence[NodeRefusal] = (),
) -> list[Put]:
    status = ModelDeploymentStatus(
        desired_replicas=desired,
        ready_replicas=ready,
        refusals=tuple(refusals),
        conditions=conditions,
    )
    value = codec.encode(status)
    return [
        codec.put_spec(deployment(name, replicas=desired)),
        Put(key=keys.status_key("ModelDeployment", name), value=value),
    ]


def put_replica(
    deployment_name: str, number: int, node: str, *conditions: Condition, group: str = ""
) -> list[Put]:
    name = f"{deployment_name}-{number}"
    memory = MemoryProof(weights_bytes=1, kv_cache_bytes=1, activation_bytes=1, overhead_bytes=1)
    formation = (
        Formation(group=group, formed_at=datetime(2026, 1, 1, tzinfo=UTC)) if group else None
    )
    spec = ReplicaSpec(
        formation=formation,
        deployment=deployment_name,
        template="t",
        model=deployment(deployment_name).spec.model,
        served_names=(deployment_name,),
        context_length=4096,
        concurrency=1,
        ranks=(RankAssignment(node=node, memory=memory),),
    )
    value = codec.encode(ReplicaStatus(conditions=conditions))
    return [
        codec.put_spec(Replica(metadata=ObjectMeta(name=name, uid=name), spec=spec)),
        Put(key=keys.status_key("Replica", name), value=value),
    ]


def put_asleep(name: str) -> list[Put]:
    conditions = (
        condition("Ready", "Sleeping", "a request wakes it"),
        condition("Asleep", "Sleeping", "a request wakes it", status=ConditionStatus.TRUE),
    )
    value = codec.encode(NodeLifeStatus(conditions=conditions))
    return [put_status(name), Put(key=keys.node_life_key(name), value=value)]


def put_away(name: str) -> list[Put]:
    lost = condition("Ready", "LeaseLost", "its agent does not renew its lease")
    life = NodeLifeStatus(conditions=(lost,))
    return [put_status(name), Put(key=keys.node_life_key(name), value=codec.encode(life))]
