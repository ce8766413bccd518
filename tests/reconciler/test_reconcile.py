"""Tests of `reconciler.reconcile`: the files that one reconcile passes, and statuses of pools, groups and routes."""

import asyncio
import sys
from pathlib import Path
from types import FrameType

import pytest

from machinery.clock import SystemClock
from reconciler.deployments.demand.scraper import DemandScraper
from reconciler.deployments.execute import Executor
from reconciler.deployments.reconcile import LeaderState
from reconciler.groups.fabric_checks import FabricCheckView
from reconciler.listers.caches import make_caches
from reconciler.listers.lister import Lister
from reconciler.nodes.liveness import NodeLiveness
from reconciler.nodes.node_views import NodeViewCache
from reconciler.reconcile import GroupContext, Reconciler, group_status, pool_status, route_status
from schemas.meta import Condition, ObjectKey, ObjectMeta, Status, find_condition
from schemas.pools import NodePool, NodePoolSpec
from schemas.replica import Replica
from schemas.route import Backend, HeaderMatch, ModelRoute, ModelRouteSpec, RouteRule
from schemas.shardgroup import GroupMember, ShardGroup, ShardGroupSpec
from store import codec, keys, objects
from store.events import EventRecorder
from store.memory import MemoryTransport
from store.port import CreateRevisionGuard, Put
from tests.support.reconciler_agents import put_lease, put_node
from tests.support.world import NOW, deployment


def get(found: Status, type_: str) -> Condition:
    condition = find_condition(found.conditions, type_)
    assert condition is not None
    return condition


def said(found: Status, type_: str) -> tuple[str, str, str]:
    condition = get(found, type_)
    return condition.status.value, condition.reason, condition.message


def test_pool() -> None:
    pool = NodePool(metadata=ObjectMeta(name="lab", generation=3), spec=NodePoolSpec())
    made = pool_status(pool, ["a", "b"], {"b", "c"}, old=None, now=NOW)
    assert said(made, "Ready") == ("True", "NodesReady", "1 of 2 nodes ready")
    assert (made.nodes, made.ready_nodes, made.observed_generation) == (2, 1, 3)
    empty = pool_status(pool, [], set(), old=None, now=NOW)
    assert said(empty, "Ready") == ("False", "NoNodes", "0 of 0 nodes ready")
    named = pool.model_copy(update={"spec": NodePoolSpec(nodes=("a", *"tuvwxyz"))})
    made = pool_status(named, ["a"], {"a"}, old=None, now=NOW)
    text = "1 of 1 nodes ready; of spec.nodes these do not exist: t, u, v, w, x and 2 more"
    assert said(made, "Ready") == ("True", "NodesReady", text)


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
    assert said(made, "Ready") == wanted
    assert (made.members, made.ready_members) == (2, len(ready))


def test_a_group_is_ready_without_its_spare() -> None:
    members = tuple(GroupMember(node=name) for name in "abc")
    spec = ShardGroupSpec(members=members, size=2)
    group = ShardGroup(metadata=ObjectMeta(name="pair"), spec=spec)
    around = GroupContext(
        members=["a", "b", "c"], known={"a", "b", "c"}, ready={"a", "c"}, replicas=["qwen-0"]
    )
    made = group_status(group, around, old=None, now=NOW)
    assert said(made, "Ready") == ("True", "MembersReady", "not ready: b")
    assert made.replicas == ("qwen-0",)


def test_route() -> None:
    backends = (Backend(deployment="x"), Backend(deployment="y"))
    route = ModelRoute(
        metadata=ObjectMeta(name="r"), spec=ModelRouteSpec(model="m", backends=backends)
    )
    made = route_status(route, {"x", "y"}, old=None, now=NOW)
    assert said(made, "Accepted") == ("True", "BackendsFound", "")
    made = route_status(route, {"x"}, old=None, now=NOW)
    assert said(made, "Accepted") == ("False", "BackendNotFound", "no such ModelDeployment: y")


def test_route_with_rules_and_fallbacks() -> None:
    backends = (Backend(deployment="x"),)
    rule = RouteRule(headers=(HeaderMatch(name="a"),), backends=(Backend(deployment="y"),))
    spec = ModelRouteSpec(model="m", backends=backends, rules=(rule,), fallbacks=("y", "z"))
    route = ModelRoute(metadata=ObjectMeta(name="r"), spec=spec)
    made = route_status(route, {"x"}, old=None, now=NOW)
    assert said(made, "Accepted") == ("False", "BackendNotFound", "no such ModelDeployment: y, z")
    made = route_status(route, {"x", "y", "z"}, old=None, now=NOW)
    assert said(made, "Accepted") == ("True", "BackendsFound", "")


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

    async with asyncio.TaskGroup() as group:
        informers = [group.create_task(informer.run()) for informer in caches.all()]
        for informer in caches.all():
            await informer.wait_synced()
        before = sys.getprofile()
        sys.setprofile(record)
        try:
            await reconciler.reconcile(ObjectKey("ModelDeployment", "qwen"))
        finally:
            sys.setprofile(before)
        for informer_task in informers:
            informer_task.cancel()
    assert await objects.get(store, Replica, "qwen-0") is not None
    assert len(files) <= 22, "\n".join(sorted(files))
