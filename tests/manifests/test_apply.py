"""Applying, on memory and on a real etcd: what the store holds afterwards."""

import asyncio

import pytest

from machinery.clock import SystemClock
from manifests import apply, plan
from manifests.errors import ManifestErrors
from manifests.trees import object_tree
from manifests.yaml import parser
from schemas.deployment import ModelDeployment
from schemas.pools import NodePool
from schemas.route import ModelRoute
from store import codec, keys, objects
from store.port import Put, Transport
from tests.manifests.making import deployment, in_pool, pool, read, route

CLOCK = SystemClock()
ALL = route() + deployment(rest=in_pool()) + pool()


async def applied(transport: Transport, text: str) -> list[tuple[str, str]]:
    outcomes = (await apply.apply(transport, read(text), CLOCK)).outcomes
    return [(outcome.obj.name, outcome.result) for outcome in outcomes]


async def revision(transport: Transport) -> int:
    return (await transport.status()).revision


async def test_everything_is_created_in_the_order_of_the_manifest(transport: Transport) -> None:
    before = await revision(transport)
    assert await applied(transport, ALL) == [
        ("chat", "created"),
        ("qwen", "created"),
        ("studio", "created"),
    ]
    assert await revision(transport) == before + 1  # one transaction: all or nothing
    found = await objects.get(transport, ModelDeployment, "qwen")
    assert found is not None
    assert (found.metadata.generation, found.spec.placement.pools) == (1, ("studio",))
    assert found.metadata.uid
    assert found.metadata.creation_timestamp is not None


async def test_the_second_apply_writes_nothing(transport: Transport) -> None:
    await applied(transport, ALL)
    before = await revision(transport)
    assert {result for _, result in await applied(transport, ALL)} == {"unchanged"}
    assert await revision(transport) == before


async def test_only_what_changed_is_written(transport: Transport) -> None:
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


async def test_outcomes_carry_the_version_that_was_written(transport: Transport) -> None:
    [outcome] = (await apply.apply(transport, read(pool()), CLOCK)).outcomes
    found = await objects.get(transport, NodePool, "studio")
    assert outcome.obj == found


async def test_output_of_get_can_be_applied_again(transport: Transport) -> None:
    await applied(transport, ALL)
    key = keys.status_key("ModelDeployment", "qwen")
    await transport.commit([], [Put(key=key, value=b'{"replicas":3}')])
    found = await objects.get(transport, ModelDeployment, "qwen")
    assert found is not None
    text = parser.dump(object_tree(found))
    assert "status:" in text
    # It says every default, which is remembered: what is said first and no more later is taken back.
    assert await applied(transport, text) == [("qwen", "configured")]
    [after] = await objects.list_all(transport, ModelDeployment)
    assert (after.spec, after.metadata.generation) == (found.spec, 1)
    assert await applied(transport, text) == [("qwen", "unchanged")]
    assert await applied(transport, text.replace("replicas: 1", "replicas: 2")) == [
        ("qwen", "configured")
    ]


async def test_a_status_in_the_store_is_left_alone(transport: Transport) -> None:
    await applied(transport, ALL)
    key = keys.status_key("ModelDeployment", "qwen")
    await transport.commit([], [Put(key=key, value=b'{"replicas":3}')])
    await applied(transport, pool() + deployment(replicas=4, rest=in_pool()))
    found = await objects.get(transport, ModelDeployment, "qwen")
    assert found is not None
    assert found.status is not None
    assert found.status.replicas == 3


async def test_nothing_is_written_if_anything_is_wrong(transport: Transport) -> None:
    before = await revision(transport)
    text = "".join(deployment(f"m-{n}") for n in range(150)) + deployment("bad", rest=in_pool("no"))
    with pytest.raises(ManifestErrors, match="there is no NodePool no"):
        await applied(transport, text)
    assert await revision(transport) == before


async def test_references_may_be_in_the_store(transport: Transport) -> None:
    await applied(transport, pool())
    await applied(transport, deployment(rest=in_pool()))
    assert await applied(transport, route()) == [("chat", "created")]
    with pytest.raises(ManifestErrors, match='ModelRoute/chat routes "chat" already'):
        await applied(transport, route("again"))
    with pytest.raises(ManifestErrors, match='ModelRoute/chat gives the model "chat"'):
        await applied(transport, deployment("chat"))


async def test_preparing_writes_nothing(transport: Transport) -> None:
    before = await revision(transport)
    changes = await apply.prepare(transport, read(ALL), CLOCK)
    assert [type(change) for change in changes] == [plan.CreatedObject] * 3
    assert await revision(transport) == before


async def test_what_is_being_deleted_is_not_written(transport: Transport) -> None:
    await applied(transport, deployment())
    [obj] = await objects.list_all(transport, ModelDeployment)
    metadata = obj.metadata.model_copy(update={"deletion_timestamp": CLOCK.now()})
    await transport.commit([], [codec.put_spec(obj.model_copy(update={"metadata": metadata}))])
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


async def test_concurrent_appliers_of_the_same_agree(transport: Transport) -> None:
    text = pool() + "".join(deployment(f"m-{n}", rest=in_pool()) for n in range(200))
    before = await revision(transport)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(applied(transport, text)) for _ in range(4)]
    results = [result for task in tasks for _, result in task.result()]
    assert results.count("created") == 201
    assert results.count("unchanged") == 3 * 201
    assert await revision(transport) == before + 3  # the pool; a hundred; a hundred


async def test_concurrent_appliers_of_different_things_lose_nothing(transport: Transport) -> None:
    async with asyncio.TaskGroup() as group:
        for count in range(1, 4):
            group.create_task(applied(transport, deployment(replicas=count)))
    [found] = await objects.list_all(transport, ModelDeployment)
    assert found.spec.replicas in (1, 2, 3)
    assert found.metadata.generation in (1, 2, 3)
    assert await objects.list_all(transport, ModelRoute) == []
