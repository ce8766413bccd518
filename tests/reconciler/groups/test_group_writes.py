"""Writes for replicas with several ranks, and their views through real caches."""

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from reconciler.deployments import observe
from reconciler.deployments.actions import CreateReplica, ReformReplica, ReleaseRanks, StartRanks
from reconciler.deployments.observe import ReplicaView
from reconciler.deployments.plan import plan
from reconciler.deployments.rollout.revisions import content_of
from reconciler.groups.group_view import GroupForm
from reconciler.nodes.liveness import Now
from reconciler.nodes.node_views import NodeViewCache
from reconciler.placement.table import NodeTable
from schemas.deployment import HubReference, ModelDeployment, ModelSource
from schemas.formation import EpochSecret, Formation, GoldenAnswer
from schemas.meta import Condition, ObjectMeta
from schemas.node import Node, NodeSpec
from schemas.pools import NodeSelector
from schemas.replica import LeavingRank, RankAssignment, RankStatus, Replica
from schemas.shardgroup import GroupMember, ShardGroup, ShardGroupSpec
from store import codec, keys
from store.errors import ConflictError
from store.port import Delete, Put
from tests.support.reconciler_agents import put_endpoint, put_lease, put_node
from tests.support.reconciler_world import (
    CachedStore,
    LeaderStore,
    cached_store,
    do,
    on,
    sharded,
)
from tests.support.world import GIB, NOW, condition, proof, with_spec

FORM = GroupForm(
    group="pair",
    backend="ring",
    parallelism="Tensor",
    port=20_000,
    environment=(("MLX_METAL_FAST_SYNCH", "1"),),
    model="qwen",
)
GOLDEN = GoldenAnswer(pieces=("a",), logprobs=(-0.5,))
CONTENT = content_of(sharded())
LATER = Now(time=NOW + timedelta(seconds=5))


def rank(node: str, gib: int = 1) -> RankAssignment:
    return RankAssignment(node=node, addresses=("10.0.0.1",), memory=proof(gib))


CREATE = CreateReplica(
    name="qwen-0", ranks=(rank("a", 4), rank("b", 4)), form=FORM, content=CONTENT
)


async def created(store: LeaderStore) -> tuple[Replica, int]:
    await store.lead()
    revision = await do(store.executor, CREATE, await store.have(sharded()), {})
    return await store.replica(), revision


async def reform(
    store: LeaderStore, before: Replica, version: int, of: ModelDeployment | None = None, **how: Any
) -> tuple[Replica, int]:
    """Write the next epoch of a replica; return what is stored, and its version."""
    action = ReformReplica(
        **{"name": "qwen-0", "ranks": before.spec.ranks, "form": FORM, "failures": 1, **how},
        because="rank 1 on b: it ended",
        version=version,
    )
    owner = await store.have(of or sharded())
    revision = await do(store.executor, action, owner, {"qwen-0": before})
    return await store.replica(), revision


async def secret_of(store: LeaderStore, node: str) -> EpochSecret | None:
    item = await store.transport.get(keys.epoch_secret_key(node, "qwen-0"))
    return None if item is None else codec.decode(EpochSecret, item)


def formation_of(replica: Replica) -> Formation:
    assert replica.spec.formation is not None
    return replica.spec.formation


async def test_all_ranks_are_written_at_once() -> None:
    store = LeaderStore()
    replica, _ = await created(store)
    assert [assignment.node for assignment in replica.spec.ranks] == ["a", "b"]
    formation = formation_of(replica)
    assert (formation.group, formation.epoch, formation.failures) == ("pair", 1, 0)
    assert formation.environment == {"MLX_METAL_FAST_SYNCH": "1"}
    first, second = [await secret_of(store, node) for node in "ab"]
    assert first == second
    assert first is not None
    assert first.epoch == 1
    assert len(first.secret) >= 32
    assert first.secret not in replica.model_dump_json(), "every node may read the Replica"
    assert await secret_of(store, "c") is None


async def test_an_epoch_restarts_the_same_replica() -> None:
    store = LeaderStore()
    before, version = await created(store)
    first = await secret_of(store, "a")
    reports = [
        Put(key=keys.rank_key(node, "qwen-0", at), value=b"{}") for at, node in enumerate("ab")
    ]
    await store.transport.commit([], reports)
    leaving = (LeavingRank(node="a", rank=0, memory_bytes=4 * GIB),)
    ranks = (rank("c", 2), rank("a", 2))
    form = FORM.with_golden(GOLDEN)
    how: dict[str, Any] = {"ranks": ranks, "form": form, "leaving": leaving}
    replica, revision = await reform(store, before, version, **how)
    now = formation_of(replica)
    assert (replica.metadata.uid, now.epoch, now.failures) == (before.metadata.uid, 2, 1)
    assert (now.because, now.golden) == ("rank 1 on b: it ended", GOLDEN)
    # The ranks of the new epoch have a new secret, and b has none any more.
    made = await secret_of(store, "a")
    assert made == await secret_of(store, "c")
    assert made is not None
    assert first is not None
    assert (made.epoch, made.secret != first.secret) == (2, True)
    assert await secret_of(store, "b") is None
    assert replica.metadata.generation == before.metadata.generation + 1
    assert replica.spec.leaving == leaving
    # Reports of b are removed; the report of a stays until its rank has ended.
    assert {key for key in await store.keys() if key.startswith("/rank/")} == {"/rank/a/qwen-0/0"}
    with pytest.raises(ConflictError):
        await reform(store, before, version, **how)
    freed = ReleaseRanks(name="qwen-0", leaving=(), version=revision)
    await do(store.executor, freed, None, {"qwen-0": replica})
    assert (await store.replica()).spec.leaving == ()
    assert not any(key.startswith("/rank/") for key in await store.keys())


async def test_the_epoch_after_a_restore_has_new_secrets() -> None:
    """Backups leave secrets out: the ranks of the restored epoch end, and the next one forms."""
    store = LeaderStore()
    before, version = await created(store)
    lost = await secret_of(store, "a")
    epoch_keys = [keys.epoch_secret_key(node, "qwen-0") for node in "ab"]
    assert all(key.startswith(keys.TRANSIENT_PREFIXES) for key in epoch_keys)
    await store.transport.commit([], [Delete(key=key) for key in epoch_keys])
    await reform(store, before, version)
    first, second = [await secret_of(store, node) for node in "ab"]
    assert first == second
    assert first is not None
    assert lost is not None
    assert (first.epoch, first.secret != lost.secret) == (2, True)


HUB = HubReference(repo="org/qwen", revision="ab" * 20)


async def test_the_ranks_of_a_hub_model_wait_until_they_are_started() -> None:
    store, of_hub = LeaderStore(), sharded(model=ModelSource(hub=HUB))
    await store.lead()
    form = replace(FORM, model=HUB.folder)
    create = replace(CREATE, form=form, content=content_of(of_hub))
    version = await do(store.executor, create, await store.have(of_hub), {})
    before = await store.replica()
    assert formation_of(before).awaits_files
    start = StartRanks(name="qwen-0", version=version)
    version = await do(store.executor, start, None, {"qwen-0": before})
    started = await store.replica()
    formation = formation_of(before).model_copy(update={"awaits_files": False})
    assert started.spec == before.spec.model_copy(update={"formation": formation})
    assert started.metadata.generation == before.metadata.generation, "it is the same epoch"
    # Each epoch waits again: its ranks may need other files.
    next_epoch, version = await reform(store, started, version, of_hub, form=form)
    assert formation_of(next_epoch).awaits_files
    small = replace(FORM, model="small", fallback=1)
    fallback, version = await reform(store, next_epoch, version, of_hub, form=small)
    assert (fallback.spec.model.path, fallback.spec.model.hub) == ("small", None)
    assert fallback.spec.template == before.spec.template
    assert not formation_of(fallback).awaits_files, "a folder is not fetched"
    back, _ = await reform(store, fallback, version, of_hub, form=form)
    assert (back.spec.model.hub, formation_of(back).awaits_files) == (HUB, True)


@pytest.fixture
async def world() -> AsyncIterator[CachedStore]:
    async with cached_store() as store:
        await store.write(*(put_node(name) for name in "abc"), *(put_lease(n) for n in "abc"))
        yield store


def put_rank(replica: Replica, number: int, *conditions: Condition | str, epoch: int = 1) -> Put:
    said = [c if isinstance(c, Condition) else condition(c) for c in conditions]
    node = replica.spec.ranks[number].node
    report = RankStatus(
        replica_uid=replica.metadata.uid, node=node, epoch=epoch, conditions=tuple(said)
    )
    return Put(key=keys.rank_key(node, replica.name, number), value=codec.encode(report))


def observed(world: CachedStore, looked: Now = LATER) -> ReplicaView:
    (replica_view,) = observe.observe(world.fleet, "qwen", looked, table=NodeTable(())).replicas
    return replica_view


async def test_the_report_of_every_rank_counts(world: CachedStore) -> None:
    replica = on("ab").replica
    await world.have(sharded(), replica)
    await world.write(put_rank(replica, 0, "Ready"), put_endpoint(replica))
    assert observed(world).is_ready
    await world.write(put_rank(replica, 1, "EpochOver"))
    view = observed(world)
    assert view.epoch is not None
    assert (view.epoch.over, view.is_ready, view.is_idle) == ("Fake", False, True)
    # Conditions of another epoch do not count.
    await world.write(put_rank(replica, 1, "EpochOver", epoch=7))
    view = observed(world)
    assert view.epoch is not None
    assert (view.epoch.over, view.is_ready) == ("", True)
    await world.write(put_rank(replica, 0, "Ready", epoch=7))
    assert not observed(world).is_ready


async def test_ranks_start_once_each_mac_has_its_files(world: CachedStore) -> None:
    view = on("ab", awaits_files=True)
    replica = view.replica
    await world.have(sharded(), replica)

    def starts() -> list[str]:
        seen = observe.observe(world.fleet, "qwen", LATER, table=NodeTable(()))
        return [action.name for action in plan(seen).actions if isinstance(action, StartRanks)]

    assert starts() == []
    await world.write(put_rank(replica, 0, "ModelPresent"))
    assert starts() == []
    await world.write(put_rank(replica, 1, "ModelPresent", epoch=7))
    assert starts() == [], "a report of another epoch says nothing of this one"
    await world.write(put_rank(replica, 1, "ModelPresent"))
    assert starts() == ["qwen-0"]


async def test_the_problem_of_a_group_is_that_of_the_rank_that_needs_help(
    world: CachedStore,
) -> None:
    replica = on("ab", awaits_files=True).replica
    await world.have(sharded(), replica)
    for number, reason in enumerate(("WaitingForFiles", "NoSpace")):
        ready = condition("Ready", reason, f"{reason}.", holds=False)
        await world.write(put_rank(replica, number, ready))
    assert observed(world).problem == "rank 1 on b: NoSpace."


async def test_any_node_of_it_may_be_lost(world: CachedStore) -> None:
    replica = on("ab").replica
    await world.have(sharded(), replica)
    await world.write(put_rank(replica, 0, "Ready"), put_endpoint(replica))
    lost = Now(time=NOW, lost=frozenset({"b"}))
    await world.write(Delete(key=keys.node_lease_key("b")))
    view = observed(world, lost)
    assert (view.is_node_lost, view.away_nodes, view.is_ready) == (True, frozenset("b"), False)
    assert view.problem == "NodeLost: b is away"


async def test_it_has_stopped_when_all_of_it_has(world: CachedStore) -> None:
    replica = on("ab").replica
    await world.have(sharded(), replica)
    await world.write(put_rank(replica, 0, "Stopped"))
    assert not observed(world).is_stopped
    assert observed(world, Now(time=NOW, lost=frozenset("b"))).is_stopped
    await world.write(put_rank(replica, 1, "Stopped"))
    assert observed(world).is_stopped


async def test_leaving_memory_is_waited_for(world: CachedStore) -> None:
    leaving_rank = LeavingRank(node="c", rank=1, memory_bytes=4 * GIB)
    replica = with_spec(on("ab").replica, leaving=(leaving_rank,))
    await world.have(sharded(), replica)
    said = RankStatus(replica_uid=replica.metadata.uid, node="c", epoch=1)
    key = keys.rank_key("c", "qwen-0", 1)
    await world.write(Put(key=key, value=codec.encode(said)))
    assert observed(world).leaving_ranks == (leaving_rank,)
    allocations = {
        view.name: [allocation.bytes // GIB for allocation in view.allocations]
        for view in NodeViewCache().refresh(world.fleet, Now(time=NOW)).nodes
    }
    assert allocations == {"a": [9], "b": [9], "c": [4]}
    # The agent removes its report once the rank has ended; without that, the time limit counts.
    assert observed(world, Now(time=NOW + timedelta(seconds=37))).leaving_ranks == ()
    await world.write(Delete(key=key))
    assert observed(world).leaving_ranks == ()


async def test_reservations_of_lists_and_selectors(world: CachedStore) -> None:
    def reserving(name: str, **spec: object) -> ShardGroup:
        made = ShardGroupSpec.model_validate({"reservation": "Exclusive", **spec})
        return ShardGroup(metadata=ObjectMeta(name=name), spec=made)

    nodes = NodeViewCache()

    def held() -> dict[str, str]:
        table = nodes.refresh(world.fleet, Now(time=NOW))
        return {view.name: view.reserved_by_group for view in table.nodes}

    listed = reserving("list", members=(GroupMember(node="a"), GroupMember(node="b")))
    await world.have(listed)
    assert held() == {"a": "list", "b": "list", "c": ""}
    selector = NodeSelector(match_labels={"cabled": "yes"})
    await world.have(reserving("cabled", selector=selector, size=2))
    assert held() == {"a": "list", "b": "list", "c": ""}
    metadata = ObjectMeta(name="c", labels={"cabled": "yes"})
    await world.have(Node(metadata=metadata, spec=NodeSpec()))
    assert held() == {"a": "list", "b": "list", "c": "cabled"}
    await world.write(Delete(key=keys.spec_key("ShardGroup", "cabled")))
    assert held()["c"] == ""


async def test_members_as_they_are_listed_or_found(world: CachedStore) -> None:
    spec = ShardGroupSpec(selector=NodeSelector(), size=2)
    await world.have(ShardGroup(metadata=ObjectMeta(name="any"), spec=spec))
    (view,) = world.fleet.group_views(["any", "Never"])
    assert (view.members, set(view.machines)) == (("a", "b", "c"), {"a", "b", "c"})
    assert world.fleet.group_views(["Auto"]) == (view,)
    assert world.fleet.group_views(["none"]) == ()
    assert world.fleet.replicas_on_group("pair") == []
    replica = on("ab").replica
    await world.have(replica)
    assert [one.name for one in world.fleet.replicas_on_group("pair")] == [replica.name]
