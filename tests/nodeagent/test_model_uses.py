"""The uses of models that agents know: short records while a leader keeps them, else from deployments themselves."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from machinery.backoff import Backoff
from machinery.clock import SystemClock
from models.inspection import model_use
from nodeagent.model_uses import DeclaredUses, ModelUses
from reconciler.services.model_uses import model_use_keeper
from schemas.deployment import ModelDeployment
from schemas.meta import ApiObject, ObjectMeta
from schemas.shardgroup import Fallback, GroupMember, ShardGroup, ShardGroupSpec
from store import codec, keys
from store.memory import MemoryTransport
from store.port import Delete, Put
from tests.support.assignments import leading
from tests.support.waiting import until, until_async
from tests.support.world import deployment

CLOCK = SystemClock()
LOOK = Backoff(first_s=0.05, limit_s=0.1)


def declared(name: str, **spec: object) -> ModelDeployment:
    made = deployment(name=name)
    return made.model_copy(update={"spec": made.spec.model_copy(update=spec)})


def group(*models: str, name: str = "pair") -> ShardGroup:
    spec = ShardGroupSpec(
        members=(GroupMember(node="a"), GroupMember(node="b")),
        fallbacks=tuple(Fallback(model=model) for model in models),
    )
    return ShardGroup(metadata=ObjectMeta(name=name, uid=name), spec=spec)


async def write(store: MemoryTransport, *objects: ApiObject) -> None:
    await store.commit([], [codec.put_spec(obj) for obj in objects])


@asynccontextmanager
async def watching(store: MemoryTransport) -> AsyncIterator[tuple[ModelUses, list[str]]]:
    """Run an agent's cache; yield it and the names that its handler was told."""
    told: list[str] = []
    cache = ModelUses(store, CLOCK, look=LOOK)
    cache.on_change(told.append)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(cache.run())
        await cache.wait_synced()
        yield cache, told
        task.cancel()


async def records_of(store: MemoryTransport) -> dict[str, int]:
    """Return the revision of each record, by its deployment."""
    listing = await store.list(keys.MODEL_USE_PREFIX)
    return {
        item.key.removeprefix(keys.MODEL_USE_PREFIX): item.mod_revision for item in listing.items
    }


async def until_marked(store: MemoryTransport) -> None:
    await until_async(lambda: store.get(keys.MODEL_USES_KEPT))


async def test_a_change_that_concerns_no_mac_reaches_no_agent() -> None:
    store = MemoryTransport(CLOCK)
    await write(store, declared("a"), declared("b"))
    async with leading(store, model_use_keeper):
        await until_marked(store)
        async with watching(store) as (cache, told):
            assert cache.is_narrow
            assert cache.items == {n: model_use(declared(n), ()) for n in ("a", "b")}
            before = await records_of(store)
            told.clear()
            await write(store, declared("a", replicas=7, served_names=("x",)))
            await write(store, declared("b", priority=5))
            await until(lambda: told == ["b"])
            assert cache.items["b"].priority == 5
            after = await records_of(store)
            assert after["a"] == before["a"]
            assert after["b"] > before["b"]


async def test_records_follow_groups_and_deletions() -> None:
    store = MemoryTransport(CLOCK)
    await write(store, declared("a"), declared("b", sharding="pair"), declared("c"))
    async with leading(store, model_use_keeper):
        await until_marked(store)
        async with watching(store) as (cache, told):
            told.clear()
            await write(store, group("small"))
            await until(lambda: told == ["b"])
            assert "small" in cache.items["b"].models
            await store.commit([], [Delete(key=keys.spec_key("ModelDeployment", "c"))])
            await until(lambda: sorted(cache.items) == ["a", "b"])


async def test_a_new_leader_corrects_what_is_wrong_and_writes_nothing_else() -> None:
    store = MemoryTransport(CLOCK)
    await write(store, declared("a"), declared("b"))
    async with leading(store, model_use_keeper):
        await until_marked(store)
    before = await records_of(store)
    gone = keys.named(keys.MODEL_USE_PREFIX, "gone")
    await store.commit([], [Put(key=gone, value=b"{}")])
    await write(store, declared("b", priority=1))
    async with leading(store, model_use_keeper):
        await until_marked(store)
        after = await records_of(store)
    assert after["a"] == before["a"]
    assert after["b"] > before["b"]
    assert "gone" not in after


async def test_a_list_of_groups_computes_each_use_once_more() -> None:
    store = MemoryTransport(CLOCK)
    names = [f"m-{number}" for number in range(20)]
    await write(store, *(declared(name, sharding="Auto") for name in names))
    await write(store, *(group(f"small-{n}", name=f"pair-{n}") for n in range(20)))
    uses, told = DeclaredUses(store, CLOCK), list[str]()
    uses.on_change(told.append)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(uses.run())
        await uses.wait_synced()
        assert sorted(uses.items) == sorted(names)
        assert all(len(item.split_models) == 21 for item in uses.items.values())
        assert len(told) <= 2 * len(names)
        task.cancel()
