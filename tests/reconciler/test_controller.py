"""The controller on a real etcd: leadership, writes, no needless writes, and a take-over in the middle of a plan."""

import asyncio
import logging
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from machinery import processes
from machinery.clock import SystemClock
from machinery.processes import ChildProcess
from nodeagent.replicas.node_replicas import NodeReplicas
from reconciler.deployments.rollout.revisions import revision_name, template_hash
from schemas.deployment import ModelDeployment
from schemas.event import Event, EventSpec
from schemas.meta import ApiObject, ObjectMeta, find_condition
from schemas.node import ModelReport, Node
from schemas.replica import Replica
from schemas.shardgroup import GroupMember, ShardGroup, ShardGroupSpec
from store import codec, keys, objects
from store.etcd.connect import connect
from store.etcd.member.embedded import EmbeddedEtcd
from store.port import Delete, KeyValue, Put, Transport
from tests.support import forker
from tests.support.etcd import running_etcd
from tests.support.reconciler_agents import FakeAgent, node_status, put_lease, put_node, put_rank
from tests.support.reconciler_world import BIG, leading, sharded
from tests.support.waiting import until, until_async
from tests.support.world import GIB, deployment, replica, revision, with_metadata

pytestmark = pytest.mark.etcd
CLOCK = SystemClock()


@pytest.fixture(scope="module")
async def etcd(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EmbeddedEtcd]:
    async with running_etcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture
async def store(etcd: EmbeddedEtcd) -> AsyncIterator[Transport]:
    """An etcd without fleet objects."""
    transport = connect(etcd.address)
    for item in (await transport.list(keys.ROOT)).items:
        await transport.commit([], [Delete(key=item.key)])
    yield transport
    await transport.close()


@asynccontextmanager
async def running(
    store: Transport, *nodes: str, grace_s: float = 30.0
) -> AsyncIterator[dict[str, asyncio.Task[None]]]:
    """Run a controller and an agent for each node; yield their tasks by name."""
    agents = [FakeAgent(store, CLOCK, name) for name in nodes]
    async with leading(store, *agents, grace_s=grace_s) as tasks:
        yield tasks


async def apply(store: Transport, *objects: ApiObject) -> None:
    await store.commit([], [codec.put_spec(obj) for obj in objects])


async def node_of(store: Transport, name: str = "qwen-0") -> str | None:
    obj = await objects.get(store, Replica, name)
    return None if obj is None else obj.spec.ranks[0].node


async def is_said(store: Transport, type_: str, reason: str) -> bool:
    obj = await objects.get(store, ModelDeployment, "qwen")
    match = (
        None if obj is None or obj.status is None else find_condition(obj.status.conditions, type_)
    )
    return match is not None and match.reason == reason


async def serves(store: Transport) -> None:
    await until_async(lambda: is_said(store, "Available", "AllReplicasReady"))


async def events(store: Transport) -> list[EventSpec]:
    return [event.spec for event in await objects.list_all(store, Event)]


async def revision_of_content(store: Transport) -> int:
    """Return when anything was last written; renewing a lease writes nothing."""
    return max(item.mod_revision for item in (await store.list(keys.ROOT)).items)


async def at_rest(store: Transport) -> tuple[int, int]:
    """Return the revisions, once the last words about the start are written."""
    seen = (0, 0)

    async def stands() -> bool:
        nonlocal seen
        before = seen
        seen = (await revision_of_content(store), (await store.status()).revision)
        await CLOCK.sleep(0.3)
        return before == seen

    await until_async(stands)
    return seen


async def test_a_deployment_serves_without_further_writes_and_drains_before_it_is_forgotten(
    store: Transport, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "reconciler.deployments.reconcile")
    async with running(store, "a", "b"):
        await apply(store, deployment(replicas=2))
        await serves(store)
        assert {await node_of(store, "qwen-0"), await node_of(store, "qwen-1")} == {"a", "b"}
        joined = await objects.get(store, Node, "a")
        assert joined is not None
        assert joined.metadata.uid == "uid-a"
        decided = {
            (record.__dict__["key"], record.__dict__["action"], record.__dict__["replica"])
            for record in caplog.records
            if record.message == "action decided"
        }
        created = {("ModelDeployment/qwen", "CreateReplica", f"qwen-{n}") for n in (0, 1)}
        assert created <= decided
        before = await at_rest(store)
        await CLOCK.sleep(2)  # the assertion is that nothing happens in this time
        assert (await revision_of_content(store), (await store.status()).revision) == before

        there = await objects.get(store, ModelDeployment, "qwen")
        assert there is not None
        mark = {"deletion_timestamp": CLOCK.now(), "finalizers": ("fleet/replicas",)}
        marked = with_metadata(there, **mark).model_copy(update={"status": None})
        watch = store.watch(keys.SPEC_PREFIX, after_revision=(await store.status()).revision)
        await apply(store, marked)
        gone: list[str] = []
        async with asyncio.timeout(30):
            async for batch in watch:
                gone += [c.key.removeprefix(keys.SPEC_PREFIX) for c in batch.changes if not c.now]
                if "ModelDeployment/qwen" in gone:
                    break
        await watch.aclose()
        revision = f"Revision/{revision_name('qwen', template_hash(marked))}"
        assert sorted(gone[:-2]) == ["Replica/qwen-0", "Replica/qwen-1"]
        assert gone[-2:] == [revision, "ModelDeployment/qwen"]
        statuses = [item.key for item in (await store.list(keys.STATUS_PREFIX)).items]
        assert statuses == [keys.status_key("Node", name) for name in "ab"]


async def test_replicas_of_an_absent_or_deleted_node_move_after_the_grace_period(
    store: Transport,
) -> None:
    async with running(store, "a", "b", grace_s=1.0) as tasks:
        await apply(store, deployment(replicas=1))
        await serves(store)
        home = await node_of(store)
        assert home is not None
        tasks[home].cancel()

        async def moved() -> str | None:
            node = await node_of(store)
            return node if node not in (home, None) else None

        other = await until_async(moved, limit_s=12)
        await serves(store)

        async def recorded() -> bool:
            reasons = {(e.about.name, e.reason) for e in await events(store)}
            return {(home, "NodeNotReady"), ("qwen", "ReplicaPlaced")} <= reasons

        await until_async(recorded, what="events of what happened")
        tasks[other].cancel()
        lease = await store.get(keys.node_lease_key(other))
        assert lease is not None
        place = (keys.status_key("Node", other), keys.spec_key("Node", other))
        await store.commit([], [Delete(key=key) for key in place])
        await store.revoke(lease.lease)
        async with asyncio.TaskGroup() as group:
            agent = group.create_task(FakeAgent(store, CLOCK, "c").run())

            async def is_on_c() -> bool:
                return await node_of(store) == "c"

            await until_async(is_on_c, limit_s=12)
            agent.cancel()


async def test_each_node_that_cannot_is_named_in_an_event(
    store: Transport, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "reconciler.deployments.reconcile")
    async with running(store, "a"):
        await store.commit([], [put_node("small", node_status("small", memory_gib=1))])
        await apply(store, deployment(replicas=9))

        async def refused() -> bool:
            # All of them: before a's lease was seen, a was not ready either.
            warnings = [e for e in await events(store) if e.type == "Warning"]
            return all(
                any(e.reason == reason and e.message.startswith(begin) for e in warnings)
                for reason, begin in (
                    ("NodeNotReady", "small: its agent does not renew its lease"),
                    ("InsufficientMemory", "a: needs 2.8 GiB"),
                    ("Unschedulable", "0/2 nodes fit: 1 short of memory"),
                )
            )

        await until_async(refused)
        assert await is_said(store, "Placed", "Unschedulable")
    logged = {
        (vars(record).get("node"), vars(record).get("reason"))
        for record in caplog.records
        if record.message == "replicas cannot be placed"
    }
    assert {("small", "NodeNotReady"), ("a", "InsufficientMemory")} <= logged


async def test_a_higher_priority_takes_the_place_of_a_lower_one(store: Transport) -> None:
    async with running(store, "a"):
        await apply(store, deployment(replicas=2))
        await serves(store)
        await apply(store, deployment(name="vip", priority=10))

        async def has_place() -> bool:
            return await node_of(store, "vip-0") == "a"

        await until_async(has_place)
        await until_async(lambda: is_said(store, "Placed", "Unschedulable"))
        (spec,) = [e for e in await events(store) if e.reason == "Preempted"]
        assert (spec.about.name, spec.about.uid, spec.type) == ("qwen", "uid-qwen", "Warning")
        assert spec.message == "qwen-0 drains and ends: vip-0 has priority 10, qwen-0 has 0"


async def test_what_the_reconciler_cannot_read_stays_and_leftovers_go(store: Transport) -> None:
    """A status of a newer release, as after a downgrade; keys of nobody; and what an ended deployment left."""
    newer = Put(key=keys.status_key("ModelDeployment", "qwen"), value=b'{"storedVersion":9}')
    stray = [
        Put(key=f"{prefix}stray", value=b"x") for prefix in (keys.SPEC_PREFIX, keys.STATUS_PREFIX)
    ]
    leftovers = [
        Put(key=keys.status_key("ModelDeployment", "gone"), value=b"{}"),
        Put(key=keys.status_key("Replica", "gone-0"), value=b"{}"),
        put_rank(replica(0, of=deployment(name="gone")).replica),
        codec.put_spec(revision(deployment(name="gone"))),
    ]
    await store.commit([], [newer, *stray, *leftovers])
    async with running(store, "a"):
        await apply(store, deployment())
        await until_async(lambda: node_of(store))

        async def are_gone() -> bool:
            there = {item.key for item in (await store.list(keys.ROOT)).items}
            return not there & {put.key for put in leftovers}

        await until_async(are_gone, what="the leftovers' end")
        await at_rest(store)
    there = await store.get(newer.key)
    assert there is not None
    assert there.value == newer.value


async def test_each_agent_gets_copies_of_its_own_replicas_from_every_leader(
    store: Transport,
) -> None:
    caches = {name: NodeReplicas(store, CLOCK, name) for name in ("a", "b")}
    async with asyncio.TaskGroup() as group:
        following = [group.create_task(cache.run()) for cache in caches.values()]

        def have_one_each() -> bool:
            return all(
                len(replicas.items) == 1 and replicas.is_narrow for replicas in caches.values()
            )

        async with running(store, "a", "b"):
            # The node that registers first has room for one: the other waits for the other node.
            await apply(store, deployment(replicas=2, memory="5Gi"))
            await until(have_one_each, what="each has its own")
        async with running(store, "a", "b"):
            await apply(store, deployment(replicas=0, memory="5Gi"))
            await until(
                lambda: not any(replicas.items for replicas in caches.values()), what="none is left"
            )
        for task in following:
            task.cancel()


@pytest.mark.timeout(180)
async def test_when_the_leader_is_killed_the_next_one_acts(
    store: Transport, etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "reconciler", "--etcd", f"unix:{etcd.address.socket}"]
    first, second = (processes.spawn(command, log=tmp_path / f"{n}.log") for n in (1, 2))
    try:
        holder = await until_async(lambda: store.get(keys.ELECTION_RECONCILER), limit_s=20)
        leader = int(holder.value.decode().rpartition("/")[2].split()[0])
        assert leader in (first.record.pid, second.record.pid)
        dead, heir = (first, second) if leader == first.record.pid else (second, first)
        dead.send(signal.SIGKILL)
        await store.commit([], [put_node("a"), put_lease("a")])

        async def registered() -> bool:
            return await objects.get(store, Node, "a") is not None

        await until_async(registered, what="the next leader acts")
        now = await store.get(keys.ELECTION_RECONCILER)
        assert now is not None
        assert now.value.decode().split()[0].endswith(f"/{heir.record.pid}")
        await processes.end(heir, CLOCK, grace_s=5)
        assert heir.exit_code() == 0
        assert await store.get(keys.ELECTION_RECONCILER) is None
    finally:
        for child in (first, second):
            child.send(signal.SIGKILL)
            await processes.wait_ended(child, CLOCK, limit_s=30)


NODES, DEPLOYMENTS, PER_DEPLOYMENT = 20, 100, 4
# Little more than the planned replicas need: one that is not counted would not fit.
MEMORY_GIB = 60


async def listen(store: Transport, revision: int, heard: list[tuple[str, KeyValue | None]]) -> None:
    watch = store.watch(keys.spec_prefix("Replica"), after_revision=revision)
    async with aclosing(watch):
        async for batch in watch:
            heard.extend((change.key, change.now) for change in batch.changes)


async def leader_of(store: Transport, children: list[ChildProcess]) -> ChildProcess:
    holder = await until_async(lambda: store.get(keys.ELECTION_RECONCILER), limit_s=20)
    pid = int(holder.value.decode().rpartition("/")[2].split()[0])
    return next(child for child in children if child.record.pid == pid)


@pytest.mark.ci
@pytest.mark.timeout(120)
async def test_the_work_of_a_killed_leader_is_finished_once(tmp_path: Path) -> None:
    async with running_etcd(tmp_path / "etcd") as etcd:
        store = connect(etcd.address)
        for at in range(NODES):
            status = node_status(f"mac-{at}", memory_gib=MEMORY_GIB)
            await store.commit([], [put_node(f"mac-{at}", status), put_lease(f"mac-{at}")])
        words = ("--etcd", f"unix:{etcd.address.socket}")
        children = [forker.start("reconciler", words, log=tmp_path / f"{n}.log") for n in (1, 2)]
        heard: list[tuple[str, KeyValue | None]] = []
        try:
            leader = await leader_of(store, children)
            revision = (await store.status()).revision
            async with asyncio.TaskGroup() as group:
                ear = group.create_task(listen(store, revision, heard))
                made = [
                    codec.put_spec(deployment(name=f"d{at:02}", replicas=PER_DEPLOYMENT))
                    for at in range(DEPLOYMENTS)
                ]
                await store.commit([], made)
                await until(lambda: len(heard) >= 40, limit_s=30, what="the first assignments")
                leader.send(signal.SIGKILL)
                await until(
                    lambda: len(heard) >= DEPLOYMENTS * PER_DEPLOYMENT, limit_s=60, what="the rest"
                )
                await CLOCK.sleep(0.5)  # the assertion is that nothing more happens
                ear.cancel()
        finally:
            for child in children:
                child.send(signal.SIGKILL)
                await processes.wait_ended(child, CLOCK, limit_s=30)
            await store.close()
    names = {f"d{at:02}-{n}" for at in range(DEPLOYMENTS) for n in range(PER_DEPLOYMENT)}
    assert Counter(key.rpartition("/")[2] for key, _ in heard) == Counter(names)
    used: Counter[str] = Counter()
    for _, item in heard:
        assert item is not None
        (rank,) = codec.decode_object(Replica, item).spec.ranks
        used[rank.node] += rank.memory.total_bytes
    assert max(used.values()) <= MEMORY_GIB * GIB


def group_agent(store: Transport, name: str) -> FakeAgent:
    """Return the agent of a Mac with half the memory that the model needs."""
    status = node_status(name, memory_gib=10)
    models = (ModelReport(path="qwen", geometry=BIG),)
    changes = {"address": f"169.254.0.{ord(name)}", "models": models}
    return FakeAgent(store, CLOCK, name, status=status.model_copy(update=changes))


async def test_a_group_is_formed_and_formed_again(store: Transport) -> None:
    members = tuple(GroupMember(node=name) for name in "abc")
    spare = ShardGroup(
        metadata=ObjectMeta(name="pair"), spec=ShardGroupSpec(members=members, size=2)
    )

    async def serves(epoch: int, nodes: str) -> Replica | None:
        obj = await objects.get(store, Replica, "qwen-0")
        if obj is None or obj.spec.formation is None or obj.status is None or obj.spec.leaving:
            return None
        there = "".join(rank.node for rank in obj.spec.ranks)
        ready = find_condition(obj.status.conditions, "Ready")
        is_serving = ready is not None and ready.reason == "Serving"
        return obj if is_serving and (obj.spec.formation.epoch, there) == (epoch, nodes) else None

    async with leading(store, *(group_agent(store, name) for name in "abc")) as tasks:
        await apply(store, spare, sharded())
        first = await until_async(lambda: serves(1, "ab"))
        # A rank other than the first reports the epoch as over; its Mac is healthy.
        await store.commit([], [put_rank(first, "EpochOver", rank=1)])
        second = await until_async(lambda: serves(2, "ab"))
        assert second.metadata.uid == first.metadata.uid
        assert second.spec.formation is not None
        assert second.spec.formation.failures == 1
        # A Mac goes, and the others say so: the spare steps in, long before the grace is over.
        tasks["b"].cancel()

        async def is_away() -> bool:
            return await store.get(keys.node_lease_key("b")) is None

        await until_async(is_away, limit_s=15)
        await store.commit([], [put_rank(second, "EpochOver")])
        await until_async(lambda: serves(3, "ac"), limit_s=15)
        group = await objects.get(store, ShardGroup, "pair")
        assert group is not None
        assert group.status is not None
        assert (group.status.members, group.status.replicas) == (3, ("qwen-0",))
