"""The readiness of a local fleet: what etcd says after the death of all processes is not taken for the present."""

from fleetctl.fleets.local_fleet import is_readiness_current
from machinery.clock import SystemClock
from schemas.deployment import ModelDeploymentStatus
from schemas.meta import Condition, ConditionStatus
from schemas.replica import Replica, ReplicaStatus
from store import codec, keys, objects
from store.memory import MemoryTransport
from store.port import Put
from tests.support.fleetctl_manifests import put_replica
from tests.support.reconciler_agents import put_endpoint
from tests.support.world import deployment


async def test_a_replica_counts_as_ready_only_with_its_endpoint() -> None:
    clock = SystemClock()
    store = MemoryTransport(clock)
    assert await is_readiness_current(store)
    model_deployment = deployment()
    ready = Condition(
        type="Ready",
        status=ConditionStatus.TRUE,
        reason="Serving",
        last_transition_time=clock.now(),
    )
    replica_status = Put(
        key=keys.status_key("Replica", "qwen-0"),
        value=codec.encode(ReplicaStatus(conditions=(ready,))),
    )
    await store.commit(
        [],
        [codec.put_spec(model_deployment), put_replica(model_deployment, 0, "a"), replica_status],
    )
    assert not await is_readiness_current(store)
    [replica] = await objects.list_all(store, Replica)
    await store.commit([], [put_endpoint(replica)])
    assert await is_readiness_current(store)
    counted = Put(
        key=keys.status_key("ModelDeployment", model_deployment.name),
        value=codec.encode(ModelDeploymentStatus(ready_replicas=2)),
    )
    await store.commit([], [counted])
    assert not await is_readiness_current(store)
