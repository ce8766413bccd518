"""Tests of `manifests.delete`: deleted, marked and refused objects."""

from collections.abc import Sequence

import pytest
from typing_extensions import override

from machinery.clock import SystemClock
from manifests import apply, delete
from manifests.errors import InUseError, NotFoundError, WriteRefusedError
from schemas.deployment import ModelDeployment
from schemas.meta import ORPHAN
from schemas.replica import Replica
from store import codec, keys, objects
from store.errors import ConflictError, UnavailableError
from store.memory import MemoryTransport
from store.port import Guard, Operation, Put, Transport
from tests.support.manifests_faults import FaultyTransport, InstantClock, lost
from tests.support.manifests_texts import deployment, in_pool, pool, read, route
from tests.support.world import replica

CLOCK = SystemClock()


async def applied(transport: Transport, text: str) -> None:
    await apply.apply(transport, read(text), CLOCK)


async def test_a_deployment_is_marked_for_the_reconciler(transport: Transport) -> None:
    await applied(transport, deployment())
    outcome = await delete.delete(transport, "ModelDeployment", "qwen", CLOCK)
    assert isinstance(outcome, delete.PendingDeletion)
    obj = await objects.get(transport, ModelDeployment, "qwen")
    assert obj is not None
    assert obj.metadata.deletion_timestamp is not None
    assert obj.metadata.finalizers == ("fleet/foreground",)
    assert obj.metadata.generation == 1
    before = (await transport.status()).revision
    again = await delete.delete(transport, "ModelDeployment", "qwen", CLOCK)
    assert isinstance(again, delete.PendingDeletion)
    assert (await transport.status()).revision == before


async def test_a_pool_is_deleted_with_its_status(transport: Transport) -> None:
    await applied(transport, pool())
    await transport.commit([], [Put(key=keys.status_key("NodePool", "studio"), value=b"{}")])
    outcome = await delete.delete(transport, "NodePool", "studio", CLOCK)
    assert outcome == delete.DeletedObject(kind="NodePool", name="studio")
    assert (await transport.list(f"{keys.ROOT}/")).items == ()


async def test_a_node_without_a_spec_can_be_deleted(transport: Transport) -> None:
    await transport.commit([], [Put(key=keys.status_key("Node", "mac-1"), value=b"{}")])
    await delete.delete(transport, "Node", "mac-1", CLOCK)
    assert (await transport.list(f"{keys.ROOT}/")).items == ()


async def test_an_object_in_use_is_not_deleted(transport: Transport) -> None:
    await applied(transport, pool() + deployment(rest=in_pool()) + deployment("b", rest=in_pool()))
    await applied(transport, route())
    with pytest.raises(InUseError) as caught:
        await delete.delete(transport, "NodePool", "studio", CLOCK)
    assert str(caught.value) == (
        "NodePool/studio is used by ModelDeployment/b, ModelDeployment/qwen. "
        "Change or delete them first"
    )
    with pytest.raises(InUseError) as caught:
        await delete.delete(transport, "ModelDeployment", "qwen", CLOCK)
    assert str(caught.value) == (
        "ModelDeployment/qwen is used by ModelRoute/chat. Change or delete it first"
    )


async def test_an_object_that_is_being_deleted_does_not_use_a_pool(transport: Transport) -> None:
    await applied(transport, pool() + deployment(rest=in_pool()))
    await delete.delete(transport, "ModelDeployment", "qwen", CLOCK)
    await delete.delete(transport, "NodePool", "studio", CLOCK)


async def test_a_missing_object_is_reported_with_suggestions(transport: Transport) -> None:
    await applied(transport, deployment() + pool())
    for kind, name, message in (
        (
            "ModelDeployment",
            "qwem",
            "; did you mean qwen? `fleetctl get modeldeployments` lists them",
        ),
        ("NodePool", "zzz", ". `fleetctl get nodepools` lists them"),
        ("ModelRoute", "zzz", ". `fleetctl get modelroutes` lists them"),
    ):
        with pytest.raises(NotFoundError) as caught:
            await delete.delete(transport, kind, name, CLOCK)
        assert str(caught.value) == f'{kind.lower()}s "{name}" not found{message}'


@pytest.mark.parametrize("kind", ["Revision", "Endpoint", "Event", "Pod"])
async def test_kinds_that_the_fleet_writes_are_refused(kind: str) -> None:
    with pytest.raises(WriteRefusedError, match="cannot be deleted: only the fleet"):
        await delete.delete(FaultyTransport(InstantClock()), kind, "a", CLOCK)


@pytest.mark.parametrize("kind", ["ModelDeployment", "NodePool"])
async def test_a_lost_answer_of_a_deletion_is_resolved_by_a_read(kind: str) -> None:
    store = FaultyTransport(InstantClock())
    await applied(store, deployment("a") + pool("a"))
    store.after = lost(2)
    await delete.delete(store, kind, "a", CLOCK)
    assert store.commits == 2


@pytest.mark.parametrize("kind", ["ModelDeployment", "NodePool"])
async def test_a_lost_request_of_a_deletion_is_an_error(kind: str) -> None:
    store = FaultyTransport(InstantClock())
    await applied(store, deployment("a") + pool("a"))
    store.before = lost(*range(2, 100))
    with pytest.raises(UnavailableError):
        await delete.delete(store, kind, "a", InstantClock())


async def test_a_mark_with_a_lost_request_is_set_again() -> None:
    store = FaultyTransport(InstantClock())
    await applied(store, deployment("a"))
    store.before = lost(2)
    outcome = await delete.delete(store, "ModelDeployment", "a", CLOCK)
    assert isinstance(outcome, delete.PendingDeletion)
    assert outcome.obj == await objects.get(store, ModelDeployment, "a")
    assert outcome.obj.metadata.deletion_timestamp is not None


async def test_a_conflict_is_retried_a_few_times() -> None:
    store = FaultyTransport(InstantClock())
    await applied(store, pool())
    key = keys.spec_key("NodePool", "studio")

    async def before(turn: int) -> None:
        if turn < limit:
            await store.quietly([Put(key=key, value=b"{}")])

    store.before = before
    limit = 100
    with pytest.raises(ConflictError, match="NodePool/studio was changed by others 5 times"):
        await delete.delete(store, "NodePool", "studio", CLOCK)
    limit = 8
    assert isinstance(await delete.delete(store, "NodePool", "studio", CLOCK), delete.DeletedObject)


async def test_a_replica_is_marked_for_its_agent(transport: Transport) -> None:
    there = replica(0).replica
    await transport.commit([], [codec.put_spec(there)])
    done = await delete.delete(transport, "Replica", "qwen-0", CLOCK)
    assert isinstance(done, delete.PendingDeletion)
    obj = await objects.get(transport, Replica, "qwen-0")
    assert obj is not None
    assert obj.metadata.deletion_timestamp is not None
    assert obj.spec == there.spec


async def test_replicas_can_be_orphaned(transport: Transport) -> None:
    await applied(transport, deployment())
    done = await delete.delete(transport, "ModelDeployment", "qwen", CLOCK, cascade="orphan")
    assert isinstance(done, delete.PendingDeletion)
    assert done.obj.metadata.finalizers == (ORPHAN,)
    # The first deletion decided what happens to the replicas.
    again = await delete.delete(transport, "ModelDeployment", "qwen", CLOCK)
    assert isinstance(again, delete.PendingDeletion)
    assert again.obj.metadata.finalizers == (ORPHAN,)


class JoiningStore(MemoryTransport):
    """A store in which the agent of mac-1 gets its lease just before the next commit."""

    is_armed = False

    @override
    async def commit(self, guards: Sequence[Guard], operations: Sequence[Operation]) -> int:
        if self.is_armed:
            self.is_armed = False
            await super().commit([], [Put(key=keys.node_lease_key("mac-1"), value=b"{}")])
        return await super().commit(guards, operations)


async def test_a_node_whose_agent_joins_meanwhile_is_not_deleted() -> None:
    store = JoiningStore(CLOCK)
    key = keys.status_key("Node", "mac-1")
    await store.commit([], [Put(key=key, value=b"{}")])
    store.is_armed = True
    with pytest.raises(InUseError):
        await delete.delete(store, "Node", "mac-1", CLOCK)
    assert await store.get(key) is not None


async def test_a_live_node_is_not_deleted_and_the_verbs_are_named(transport: Transport) -> None:
    lease = Put(key=keys.node_lease_key("mac-1"), value=b"{}")
    await transport.commit([], [Put(key=keys.status_key("Node", "mac-1"), value=b"{}"), lease])
    with pytest.raises(InUseError) as refused:
        await delete.delete(transport, "Node", "mac-1", CLOCK)
    message = str(refused.value)
    assert "its agent would register it again" in message
    assert "`fleetctl cordon mac-1`" in message
    assert "`fleetctl drain mac-1`" in message
    assert "spec." not in message
