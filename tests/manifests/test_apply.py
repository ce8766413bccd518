"""Tests of `manifests.apply`: normal applies, conflicts, lost answers, and silence half-way."""

import asyncio

import pytest

from machinery.clock import Clock, SystemClock
from manifests import apply, ownership, plan
from manifests.apply import ApplyOptions
from manifests.errors import ApplyError, ManifestErrors
from manifests.trees import object_tree
from manifests.yaml import parser
from schemas.deployment import ModelDeployment
from schemas.meta import ApiObject
from store import codec, keys, objects
from store.errors import ConflictError, NoSpaceError, UnavailableError
from store.port import Delete, Put, Transport
from tests.support.manifests_faults import FaultyTransport, InstantClock, lost
from tests.support.manifests_texts import deployment, in_pool, pool, read, route
from tests.support.world import with_metadata

CLOCK = SystemClock()
ALL = route() + deployment(rest=in_pool()) + pool()


async def applied(transport: Transport, text: str) -> list[tuple[str, str]]:
    outcomes = (await apply.apply(transport, read(text), CLOCK)).outcomes
    return [(outcome.obj.name, outcome.result) for outcome in outcomes]


async def revision(transport: Transport) -> int:
    return (await transport.status()).revision


async def test_objects_are_created_in_the_order_of_the_manifests(transport: Transport) -> None:
    before = await revision(transport)
    assert await applied(transport, ALL) == [
        ("chat", "created"),
        ("qwen", "created"),
        ("studio", "created"),
    ]
    assert await revision(transport) == before + 1  # one transaction: all or nothing
    obj = await objects.get(transport, ModelDeployment, "qwen")
    assert obj is not None
    assert (obj.metadata.generation, obj.spec.placement.pools) == (1, ("studio",))
    assert obj.metadata.uid
    assert obj.metadata.creation_timestamp is not None


async def test_the_second_apply_writes_nothing(transport: Transport) -> None:
    await applied(transport, ALL)
    before = await revision(transport)
    assert {result for _, result in await applied(transport, ALL)} == {"unchanged"}
    assert await revision(transport) == before


async def test_only_changed_objects_are_written(transport: Transport) -> None:
    await applied(transport, ALL)
    [old] = await objects.list_all(transport, ModelDeployment)
    assert await applied(transport, pool() + deployment(replicas=4, rest=in_pool())) == [
        ("studio", "unchanged"),
        ("qwen", "configured"),
    ]
    [new] = await objects.list_all(transport, ModelDeployment)
    assert (new.spec.replicas, new.metadata.generation) == (4, 2)
    assert new.metadata.uid == old.metadata.uid
    assert new.metadata.creation_timestamp == old.metadata.creation_timestamp


async def test_output_of_get_can_be_applied_again(transport: Transport) -> None:
    await applied(transport, ALL)
    key = keys.status_key("ModelDeployment", "qwen")
    await transport.commit([], [Put(key=key, value=b'{"replicas":3}')])
    obj = await objects.get(transport, ModelDeployment, "qwen")
    assert obj is not None
    text = parser.dump(object_tree(obj))
    assert "status:" in text
    assert await applied(transport, text) == [("qwen", "unchanged")]
    [after] = await objects.list_all(transport, ModelDeployment)
    assert after.metadata == obj.metadata
    more = text.replace("replicas: 1", "replicas: 2")
    assert await applied(transport, more) == [("qwen", "configured")]
    obj = await objects.get(transport, ModelDeployment, "qwen")
    assert obj is not None
    assert obj.status is not None
    assert obj.status.replicas == 3, "an apply keeps the status"


async def test_nothing_is_written_if_one_object_is_invalid(transport: Transport) -> None:
    before = await revision(transport)
    text = "".join(deployment(f"m-{n}") for n in range(150)) + deployment("bad", rest=in_pool("no"))
    with pytest.raises(ManifestErrors, match="there is no NodePool no"):
        await applied(transport, text)
    assert await revision(transport) == before


async def test_references_may_be_in_the_store(transport: Transport) -> None:
    await applied(transport, pool())
    await applied(transport, deployment(rest=in_pool()))
    assert await applied(transport, route()) == [("chat", "created")]
    with pytest.raises(ManifestErrors, match='ModelRoute/chat already routes "chat"'):
        await applied(transport, route("again"))
    with pytest.raises(ManifestErrors, match='ModelRoute/chat sends the model "chat"'):
        await applied(transport, deployment("chat"))


async def test_preparing_writes_nothing(transport: Transport) -> None:
    before = await revision(transport)
    changes = await apply.prepare(transport, read(ALL), CLOCK)
    assert [type(change) for change in changes] == [plan.CreatedObject] * 3
    assert await revision(transport) == before


async def test_an_object_that_is_being_deleted_is_not_written(transport: Transport) -> None:
    await applied(transport, deployment())
    [obj] = await objects.list_all(transport, ModelDeployment)
    await transport.commit([], [marked(obj, CLOCK)])
    before = await revision(transport)
    with pytest.raises(ManifestErrors, match=r"is being deleted\. Wait for it"):
        await applied(transport, pool() + deployment(replicas=7))
    assert await revision(transport) == before


async def test_a_thousand_deployments(transport: Transport) -> None:
    loaded = read("".join(deployment(f"m-{n}") for n in range(1000)))
    before = await revision(transport)
    begun = CLOCK.monotonic()
    outcomes = (await apply.apply(transport, loaded, CLOCK)).outcomes
    first_s = CLOCK.monotonic() - begun
    assert {outcome.result for outcome in outcomes} == {"created"}
    assert await revision(transport) == before + 10
    again = (await apply.apply(transport, loaded, CLOCK)).outcomes
    assert {outcome.result for outcome in again} == {"unchanged"}
    assert await revision(transport) == before + 10
    assert first_s < 10


async def test_large_objects_fit_into_transactions(transport: Transport) -> None:
    large = f"  annotations: {{a: {'x' * 700_000}}}\n"
    text = "".join(deployment(f"m-{n}", meta=large) for n in range(4))
    assert {result for _, result in await applied(transport, text)} == {"created"}


async def test_concurrent_applies_of_the_same_manifests_agree(transport: Transport) -> None:
    text = pool() + "".join(deployment(f"m-{n}", rest=in_pool()) for n in range(200))
    before = await revision(transport)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(applied(transport, text)) for _ in range(4)]
    results = [result for task in tasks for _, result in task.result()]
    assert results.count("created") == 201
    assert results.count("unchanged") == 3 * 201
    assert await revision(transport) == before + 3  # the pool; a hundred; a hundred


MANY = "".join(deployment(f"m-{n:03}") for n in range(250))


@pytest.fixture
def clock() -> InstantClock:
    return InstantClock()


@pytest.fixture
def store(clock: InstantClock) -> FaultyTransport:
    return FaultyTransport(clock)


def other(replicas: int) -> Put:
    """Another client writes an object with the same name."""
    [change] = plan.plan_changes(read(deployment(replicas=replicas)), {}, now=InstantClock().now())
    return codec.put_spec(change.obj)


async def results(store: FaultyTransport, clock: InstantClock, text: str) -> list[str]:
    return [outcome.result for outcome in (await apply.apply(store, read(text), clock)).outcomes]


async def replicas(store: FaultyTransport) -> int:
    obj = await objects.get(store, ModelDeployment, "qwen")
    assert obj is not None
    return obj.spec.replicas


async def test_a_conflict_leads_to_a_new_plan(store: FaultyTransport, clock: InstantClock) -> None:
    async def before(turn: int) -> None:
        if turn <= 4:
            await store.quietly([other(10 + turn)])

    store.before = before
    assert await results(store, clock, deployment(replicas=2)) == ["configured"]
    assert (await replicas(store), store.commits) == (2, 5)


async def test_a_conflict_with_an_equal_write_is_ignored(
    store: FaultyTransport, clock: InstantClock
) -> None:
    async def before(turn: int) -> None:
        await store.quietly([other(2)])

    store.before = before
    assert await results(store, clock, deployment(replicas=2)) == ["unchanged"]
    assert store.commits == 1


async def test_repeated_conflicts_name_the_object(
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
        "Applying again is safe: objects that are written already stay as they are."
    )


async def test_a_write_with_a_lost_answer_counts_if_it_was_applied(
    store: FaultyTransport, clock: InstantClock
) -> None:
    store.after = lost(1)
    assert await results(store, clock, deployment() + pool()) == ["created", "created"]
    assert store.commits == 1


async def test_a_write_with_a_lost_request_is_repeated(
    store: FaultyTransport, clock: InstantClock
) -> None:
    store.before = lost(1, 2)
    assert await results(store, clock, deployment() + pool()) == ["created", "created"]
    assert store.commits == 3
    assert 0 < clock.slept_s < 10


async def test_an_unavailable_store_half_way_reports_what_was_written(
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
        "Applying again is safe: objects that are written already stay as they are."
    )
    store.before = lost()
    again = await results(store, clock, MANY + pool())
    assert (again.count("created"), again.count("unchanged")) == (250, 1)


async def test_other_batches_finish_when_one_fails(
    store: FaultyTransport, clock: InstantClock
) -> None:
    async def before(turn: int) -> None:
        await asyncio.sleep(0)  # until all of them have started
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


def marked(obj: ApiObject, clock: Clock) -> Put:
    return codec.put_spec(with_metadata(obj, deletion_timestamp=clock.now()))


async def test_a_concurrent_deletion_is_respected(
    store: FaultyTransport, clock: InstantClock
) -> None:
    await results(store, clock, deployment())
    [model_deployment] = await objects.list_all(store, ModelDeployment)

    async def before(turn: int) -> None:
        if turn == 2:
            await store.quietly([marked(model_deployment, clock)])

    store.before = before
    with pytest.raises(ManifestErrors, match="is being deleted"):
        await results(store, clock, deployment(replicas=2))
    assert await replicas(store) == 1


async def test_a_concurrently_deleted_pool_is_noticed_when_planning_again(
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


async def test_a_broken_document_prevents_only_its_own_apply(
    store: FaultyTransport, clock: InstantClock
) -> None:
    key = keys.spec_key("ModelDeployment", "odd")
    await store.quietly([Put(key=key, value=b'{"newer": true}')])
    assert await results(store, clock, deployment()) == ["created"]
    with pytest.raises(codec.UndecodableError, match="ModelDeployment/odd"):
        await results(store, clock, deployment("odd"))


async def test_objects_to_prune_do_not_block_planning_again(
    store: FaultyTransport, clock: InstantClock
) -> None:
    """A renamed route takes over the model of the pruned one, also after a write conflict."""
    site = ApplyOptions(apply_set="site", prune=True)
    text = deployment() + route()
    await apply.apply(store, read(text), clock, site)
    written = store.commits

    async def before(turn: int) -> None:
        if turn == written + 2:  # the first commit writes the inventory
            await store.quietly([other(7)])

    store.before = before
    renamed = text.replace("name: chat", "name: talk").replace("replicas: 1", "replicas: 2")
    done = await apply.apply(store, read(renamed), clock, site)
    assert [outcome.result for outcome in done.outcomes] == ["configured", "created"]
    assert done.pruned == (("ModelRoute", "chat"),)


async def test_a_concurrent_writer_of_the_same_field_is_a_conflict(
    store: FaultyTransport, clock: InstantClock
) -> None:
    await results(store, clock, deployment(replicas=2))

    async def before(turn: int) -> None:
        obj = await objects.get(store, ModelDeployment, "qwen")
        assert obj is not None
        if turn == 2:
            spec = obj.spec.model_copy(update={"replicas": 5})
            after = obj.model_copy(update={"spec": spec})
            scaled = ownership.record_update(obj, after, "fleetctl-scale", clock.now())
            await store.quietly([codec.put_spec(scaled)])

    store.before = before
    with pytest.raises(ManifestErrors, match="is 5, set by fleetctl-scale; the manifest says 3"):
        await results(store, clock, deployment(replicas=3))
    assert await replicas(store) == 5
