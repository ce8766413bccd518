"""One reconcile and the keys that changes queue: files passed, statuses of pools, groups and routes, own writes."""

import asyncio
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

import pytest

from machinery.clock import SystemClock
from machinery.control_loop import WorkQueue
from reconciler.deployments.demand.scraper import DemandScraper
from reconciler.deployments.execute import Executor
from reconciler.deployments.reconcile import LeaderState
from reconciler.event_handlers import EventHandlers
from reconciler.groups.fabric_checks import FabricCheckView
from reconciler.listers.caches import Caches, OwnWrites, make_caches
from reconciler.listers.lister import Lister
from reconciler.nodes.liveness import NodeLiveness
from reconciler.nodes.node_views import NodeViewCache
from reconciler.reconcile import GroupContext, Reconciler, group_status, pool_status, route_status
from schemas.meta import ObjectKey, ObjectMeta
from schemas.pools import NodePool, NodePoolSpec
from schemas.replica import Replica
from schemas.route import Backend, HeaderMatch, ModelRoute, ModelRouteSpec, RouteRule
from schemas.shardgroup import GroupMember, ShardGroup, ShardGroupSpec
from store import codec, keys, objects
from store.events import EventRecorder
from store.memory import MemoryTransport
from store.port import CreateRevisionGuard, KeyValue, Operation, Put
from tests.support.clock import FakeClock
from tests.support.reconciler_agents import put_lease, put_node
from tests.support.reconciler_world import following
from tests.support.world import NOW, condition_of, deployment, replica


def test_pool() -> None:
    pool = NodePool(metadata=ObjectMeta(name="lab", generation=3), spec=NodePoolSpec())
    made = pool_status(pool, ["a", "b"], {"b", "c"}, old=None, now=NOW)
    assert condition_of(made, "Ready") == ("True", "NodesReady", "1 of 2 nodes ready")
    assert (made.nodes, made.ready_nodes, made.observed_generation) == (2, 1, 3)
    empty = pool_status(pool, [], set(), old=None, now=NOW)
    assert condition_of(empty, "Ready") == ("False", "NoNodes", "0 of 0 nodes ready")
    named = pool.model_copy(update={"spec": NodePoolSpec(nodes=("a", *"tuvwxyz"))})
    made = pool_status(named, ["a"], {"a"}, old=None, now=NOW)
    text = "1 of 1 nodes ready; of spec.nodes these do not exist: t, u, v, w, x and 2 more"
    assert condition_of(made, "Ready") == ("True", "NodesReady", text)


@pytest.mark.parametrize(
    ("known", "ready", "wanted"),
    [
        (["a", "b"], {"a", "b"}, ("True", "MembersReady", "")),
        (["a", "b"], {"a"}, ("False", "MemberNotReady", "1 of 2 members ready; not ready: b")),
        (["a"], {"a"}, ("False", "UnknownNode", "1 of 2 members ready; no such node: b")),
    ],
)
def test_group(known: list[str], ready: set[str], wanted: tuple[str, str, str]) -> None:
    members = (GroupMember(node="a"), GroupMember(node="b"))
    group = ShardGroup(metadata=ObjectMeta(name="pair"), spec=ShardGroupSpec(members=members))
    around = GroupContext(members=["a", "b"], known={*known}, ready=ready)
    made = group_status(group, around, old=None, now=NOW)
    assert condition_of(made, "Ready") == wanted
    assert (made.members, made.ready_members) == (2, len(ready))


def test_a_group_is_ready_without_its_spare() -> None:
    members = tuple(GroupMember(node=name) for name in "abc")
    spec = ShardGroupSpec(members=members, size=2)
    group = ShardGroup(metadata=ObjectMeta(name="pair"), spec=spec)
    around = GroupContext(
        members=["a", "b", "c"], known={"a", "b", "c"}, ready={"a", "c"}, replicas=["qwen-0"]
    )
    made = group_status(group, around, old=None, now=NOW)
    assert condition_of(made, "Ready") == ("True", "MembersReady", "not ready: b")
    assert made.replicas == ("qwen-0",)


def test_route() -> None:
    backends = (Backend(deployment="x"),)
    rule = RouteRule(headers=(HeaderMatch(name="a"),), backends=(Backend(deployment="y"),))
    spec = ModelRouteSpec(model="m", backends=backends, rules=(rule,), fallbacks=("y", "z"))
    route = ModelRoute(metadata=ObjectMeta(name="r"), spec=spec)
    made = route_status(route, {"x", "y", "z"}, old=None, now=NOW)
    assert condition_of(made, "Accepted") == ("True", "BackendsFound", "")
    for known, absent in (({"x"}, "y, z"), ({"y", "z"}, "x")):
        made = route_status(route, known, old=None, now=NOW)
        message = f"no such ModelDeployment: {absent}"
        assert condition_of(made, "Accepted") == ("False", "BackendNotFound", message)


ROOT = f"{Path(__file__).parents[2]}/"


async def test_a_reader_of_one_reconcile_passes_at_most_22_files() -> None:
    """Count the files with a function that one reconcile calls; it reads all nodes, and creates a replica."""
    clock = SystemClock()
    store = MemoryTransport(clock)
    caches = make_caches(store, clock)
    term = await store.commit([], [Put(key=keys.ELECTION_RECONCILER, value=b"me")])
    fence = CreateRevisionGuard(key=keys.ELECTION_RECONCILER, create_revision=term)
    state = LeaderState(
        liveness=NodeLiveness(30),
        nodes=NodeViewCache(),
        demand=DemandScraper(store, clock, needed=frozenset, on_change=lambda _: None),
        waiting_for_room=set(),
    )
    reconciler = Reconciler(
        Lister(caches),
        state,
        Executor(store, clock, lambda: fence),
        EventRecorder(store, clock, source="reconciler"),
        clock,
        fabric=lambda _: FabricCheckView(),
    )
    await store.commit([], [put_node("a"), put_lease("a"), codec.put_spec(deployment())])
    task, files = asyncio.current_task(), set[str]()

    def record(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        is_ours = code.co_flags & 1 and code.co_filename.startswith(f"{ROOT}reconciler/")
        if event == "call" and is_ours and asyncio.current_task() is task:
            files.add(code.co_filename.removeprefix(ROOT))

    async with following(caches):
        before = sys.getprofile()
        sys.setprofile(record)
        try:
            await reconciler.reconcile(ObjectKey("ModelDeployment", "qwen"))
        finally:
            sys.setprofile(before)
    assert await objects.get(store, Replica, "qwen-0") is not None
    assert len(files) <= 22, "\n".join(sorted(files))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def queue(clock: FakeClock) -> WorkQueue[ObjectKey]:
    return WorkQueue(clock)


async def _caches(clock: FakeClock, there: list[Operation]) -> Caches:
    """Return caches that have read these objects and are not watching."""
    transport = MemoryTransport(clock)
    await transport.commit([], there)
    caches = make_caches(transport, clock)
    for informer in caches.all():
        await informer.list_once()
    return caches


def _item(put: Put) -> KeyValue:
    return KeyValue(key=put.key, value=put.value, create_revision=9, mod_revision=9)


async def _taken(queue: WorkQueue[ObjectKey]) -> list[str]:
    return [str(await queue.get()) for _ in range(len(queue))]


async def test_a_new_leader_acts_on_a_change_before_it_looks_at_its_fleet(
    queue: WorkQueue[ObjectKey], clock: FakeClock
) -> None:
    made = [deployment(name=f"d{number}") for number in range(3)]
    caches = await _caches(clock, [codec.put_spec(model_deployment) for model_deployment in made])
    handlers = EventHandlers(Lister(caches), NodeLiveness(0), queue, clock)
    handlers.connect()
    caches.specs.suppose(_item(codec.put_spec(made[0])))  # a change before it led
    handlers.queue_everything()
    caches.specs.suppose(_item(codec.put_spec(deployment(name="after"))))
    assert (await _taken(queue))[0] == "ModelDeployment/after"


async def test_a_lease_queues_what_it_concerns_and_not_the_fleet(
    queue: WorkQueue[ObjectKey], clock: FakeClock
) -> None:
    own, other, waiting = (deployment(name=name) for name in ("own", "other", "waiting"))
    caches = await _caches(
        clock,
        [
            *(put_node(name) for name in ("here", "there")),
            *(codec.put_spec(model_deployment) for model_deployment in (own, other, waiting)),
            codec.put_spec(replica(0, on="here", of=own).replica),
            codec.put_spec(replica(0, on="there", of=other).replica),
        ],
    )
    handlers = EventHandlers(Lister(caches), NodeLiveness(0), queue, clock)
    handlers.connect()
    handlers.waiting_for_room.add("waiting")
    caches.leases.suppose(_item(put_lease("here")))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(handlers.run())
        await clock.advance(1)
        running.cancel()
    found = await _taken(queue)
    assert {"Node/here", "ModelDeployment/own", "ModelDeployment/waiting"} <= set(found)
    assert "ModelDeployment/other" not in found


@pytest.fixture
def own() -> OwnWrites:
    return OwnWrites()


def item(value: bytes, key: str = "/k") -> KeyValue:
    return KeyValue(key=key, value=value, create_revision=1, mod_revision=9)


def test_a_change_of_others_is_news(own: OwnWrites) -> None:
    heard: list[str] = []
    own.report(7, "qwen", lambda: heard.append("qwen"))
    assert heard == ["qwen"]


def test_an_own_change_is_none(own: OwnWrites) -> None:
    heard: list[str] = []
    with own.writing("qwen") as note:
        note(7)
    own.report(7, "qwen", lambda: heard.append("own"))
    own.report(8, "qwen", lambda: heard.append("later"))
    own.report(7, "llama", lambda: heard.append("preempted"))
    assert heard == ["later", "preempted"]


def test_a_watch_may_be_faster_than_the_answer(own: OwnWrites) -> None:
    heard: list[str] = []
    with own.writing("qwen") as note:
        own.report(7, "qwen", lambda: heard.append("own"))
        own.report(6, "qwen", lambda: heard.append("of others"))
        assert heard == []
        note(7)
    assert heard == ["of others"]


def test_two_writes_may_be_made_at_once(own: OwnWrites) -> None:
    heard: list[str] = []
    with own.writing("qwen") as note:
        with own.writing("llama") as note_other:
            own.report(7, "qwen", lambda: heard.append("own"))
            own.report(6, "qwen", lambda: heard.append("of others"))
            note_other(8)
        own.report(8, "llama", lambda: heard.append("own, too"))
        assert heard == []
        note(7)
    assert heard == ["of others"]


def test_a_write_without_answer_is_news(own: OwnWrites) -> None:
    heard: list[str] = []
    with suppress(TimeoutError), own.writing("qwen"):
        own.report(7, "qwen", lambda: heard.append("during"))
        raise TimeoutError
    own.report(7, "qwen", lambda: heard.append("after"))
    assert heard == ["during", "after"]


def test_a_write_for_nobody_is_news(own: OwnWrites) -> None:
    heard: list[str] = []
    with own.writing("") as note:
        note(7)
    own.report(7, "", lambda: heard.append("news"))
    assert heard == ["news"]
