"""Applying on a bad day: conflicts, lost answers, silence in the middle."""

import asyncio

import pytest

from manifests import apply, ownership, plan
from manifests.apply import ApplyOptions
from manifests.errors import ApplyError, ManifestErrors
from schemas.deployment import ModelDeployment
from schemas.meta import ApiObject
from store import codec, keys, objects
from store.errors import ConflictError, NoSpaceError, UnavailableError
from store.port import Delete, Put
from tests.manifests.faulty import FaultyTransport, InstantClock, lost
from tests.manifests.making import deployment, in_pool, pool, read, route

MANY = "".join(deployment(f"m-{n:03}") for n in range(250))


@pytest.fixture
def clock() -> InstantClock:
    return InstantClock()


@pytest.fixture
def store(clock: InstantClock) -> FaultyTransport:
    return FaultyTransport(clock)


def other(replicas: int) -> Put:
    """What somebody else writes under the same name."""
    [change] = plan.plan_changes(read(deployment(replicas=replicas)), {}, now=InstantClock().now())
    return codec.put_spec(change.obj)


async def results(store: FaultyTransport, clock: InstantClock, text: str) -> list[str]:
    return [one.result for one in (await apply.apply(store, read(text), clock)).outcomes]


async def replicas(store: FaultyTransport) -> int:
    found = await objects.get(store, ModelDeployment, "qwen")
    assert found is not None
    return found.spec.replicas


async def test_a_conflict_is_planned_again(store: FaultyTransport, clock: InstantClock) -> None:
    async def before(turn: int) -> None:
        if turn <= 4:
            await store.quietly([other(10 + turn)])

    store.before = before
    assert await results(store, clock, deployment(replicas=2)) == ["configured"]
    assert (await replicas(store), store.commits) == (2, 5)


async def test_a_conflict_with_the_same_is_none(
    store: FaultyTransport, clock: InstantClock
) -> None:
    async def before(turn: int) -> None:
        await store.quietly([other(2)])

    store.before = before
    assert await results(store, clock, deployment(replicas=2)) == ["unchanged"]
    assert store.commits == 1


async def test_endless_conflicts_name_the_object(
    store: FaultyTransport, clock: InstantClock
) -> None:
    async def before(turn: int) -> None:
        await store.quietly([other(10 + turn)])

    store.before = before
    with pytest.raises(ApplyError) as caught:
        await results(store, clock, deployment(replicas=2) + pool())
    assert isinstance(caught.value.__cause__, ConflictError)
    assert str(caught.value) == (
        "wrote none of 2 objects: ModelDeployment/qwen was changed by others 5 times in a row. "
        "Not written: NodePool/studio, ModelDeployment/qwen. "
        "Applying again is safe: what is written already is left alone."
    )


async def test_a_lost_answer_counts_as_written_if_it_is_there(
    store: FaultyTransport, clock: InstantClock
) -> None:
    store.after = lost(1)
    assert await results(store, clock, deployment() + pool()) == ["created", "created"]
    assert store.commits == 1


async def test_a_lost_request_is_sent_again(store: FaultyTransport, clock: InstantClock) -> None:
    store.before = lost(1, 2)
    assert await results(store, clock, deployment() + pool()) == ["created", "created"]
    assert store.commits == 3
    assert 0 < clock.slept_s < 10


async def test_silence_in_the_middle_says_what_was_written(
    store: FaultyTransport, clock: InstantClock
) -> None:
    store.before = lost(*range(2, 100))
    with pytest.raises(ApplyError) as caught:
        await results(store, clock, MANY + pool())
    error = caught.value
    assert error.written == (("NodePool", "studio"),)
    assert len(error.missing) == 250
    assert isinstance(error.__cause__, UnavailableError)
    shown = ", ".join(f"ModelDeployment/m-{n:03}" for n in range(10))
    assert str(error) == (
        "wrote 1 of 251 objects: the store did not answer: no answer. "
        f"Not written: {shown} and 240 more. Written: NodePool/studio. "
        "Applying again is safe: what is written already is left alone."
    )
    store.before = lost()
    again = await results(store, clock, MANY + pool())
    assert (again.count("created"), again.count("unchanged")) == (250, 1)


async def test_other_batches_end_well_when_one_fails(
    store: FaultyTransport, clock: InstantClock
) -> None:
    async def before(turn: int) -> None:
        await asyncio.sleep(0)  # until all of them are under way
        if turn == 2:
            raise NoSpaceError("the store is full")

    store.before = before
    with pytest.raises(ApplyError, match="wrote 150 of 250 objects: the store is full") as caught:
        await results(store, clock, MANY)
    assert len(await objects.list_all(store, ModelDeployment)) == 150
    there = {obj.name for obj in await objects.list_all(store, ModelDeployment)}
    assert {name for _, name in caught.value.written} == there


async def test_a_deployment_waits_for_its_pool(store: FaultyTransport, clock: InstantClock) -> None:
    async def before(turn: int) -> None:
        if turn == 1:
            raise NoSpaceError("the store is full")

    store.before = before
    text = "".join(deployment(f"m-{n:03}", rest=in_pool()) for n in range(250)) + pool()
    with pytest.raises(ApplyError, match="wrote none of 251 objects"):
        await results(store, clock, text)
    assert store.commits == 1


async def test_a_thousand_objects_need_few_requests(
    store: FaultyTransport, clock: InstantClock
) -> None:
    await results(store, clock, "".join(deployment(f"m-{n}") for n in range(1000)))
    assert (store.lists, store.commits) == (4, 10)


def marked(obj: ApiObject, clock: InstantClock) -> Put:
    metadata = obj.metadata.model_copy(update={"deletion_timestamp": clock.now()})
    return codec.put_spec(obj.model_copy(update={"metadata": metadata}))


async def test_a_deletion_meanwhile_is_respected(
    store: FaultyTransport, clock: InstantClock
) -> None:
    await results(store, clock, deployment())
    [found] = await objects.list_all(store, ModelDeployment)

    async def before(turn: int) -> None:
        if turn == 2:
            await store.quietly([marked(found, clock)])

    store.before = before
    with pytest.raises(ManifestErrors, match="is being deleted"):
        await results(store, clock, deployment(replicas=2))
    assert await replicas(store) == 1


async def test_a_pool_that_goes_meanwhile_is_noticed_at_the_next_look(
    store: FaultyTransport, clock: InstantClock
) -> None:
    await results(store, clock, pool() + deployment())

    async def before(turn: int) -> None:
        if turn == 2:
            gone = Delete(key=keys.spec_key("NodePool", "studio"))
            await store.quietly([gone, other(9)])

    store.before = before
    with pytest.raises(ManifestErrors, match="there is no NodePool studio"):
        await results(store, clock, deployment(rest=in_pool()))
    assert await replicas(store) == 9


async def test_one_bad_document_stops_only_who_applies_it(
    store: FaultyTransport, clock: InstantClock
) -> None:
    key = keys.spec_key("ModelDeployment", "odd")
    await store.quietly([Put(key=key, value=b'{"newer": true}')])
    assert await results(store, clock, deployment()) == ["created"]
    with pytest.raises(codec.UndecodableError, match="ModelDeployment/odd"):
        await results(store, clock, deployment("odd"))


async def test_what_is_to_be_pruned_is_not_in_the_way_of_a_second_look(
    store: FaultyTransport, clock: InstantClock
) -> None:
    """A route that gets another name takes the model of the one that goes; so it does after a conflict."""
    site = ApplyOptions(apply_set="site", prune=True)
    text = deployment() + route()
    await apply.apply(store, read(text), clock, site)
    written = store.commits

    async def before(turn: int) -> None:
        if turn == written + 2:  # the first is the inventory's
            await store.quietly([other(7)])

    store.before = before
    renamed = text.replace("name: chat", "name: talk").replace("replicas: 1", "replicas: 2")
    done = await apply.apply(store, read(renamed), clock, site)
    assert [one.result for one in done.outcomes] == ["configured", "created"]
    assert done.pruned == (("ModelRoute", "chat"),)


async def test_another_writer_in_between_is_a_conflict_then(
    store: FaultyTransport, clock: InstantClock
) -> None:
    await results(store, clock, deployment(replicas=2))

    async def before(turn: int) -> None:
        found = await objects.get(store, ModelDeployment, "qwen")
        assert found is not None
        if turn == 2:
            spec = found.spec.model_copy(update={"replicas": 5})
            after = found.model_copy(update={"spec": spec})
            scaled = ownership.record_update(found, after, "fleetctl-scale", clock.now())
            await store.quietly([codec.put_spec(scaled)])

    store.before = before
    with pytest.raises(ManifestErrors, match="is 5, set by fleetctl-scale; the manifest says 3"):
        await results(store, clock, deployment(replicas=3))
    assert await replicas(store) == 5
