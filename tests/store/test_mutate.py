"""Tests of `store.mutate`: one change of one document, with concurrent writers and lost answers."""

import asyncio
import os
import signal
from collections.abc import Callable, Sequence

import pytest
from typing_extensions import override

from machinery.clock import SystemClock
from schemas.deployment import ModelDeployment, ModelDeploymentStatus
from schemas.meta import Status
from store import codec, keys, objects, versions
from store.errors import (
    ConflictError,
    FencedError,
    NotFoundError,
    StoreError,
    UnavailableError,
    UnknownOutcomeError,
)
from store.etcd.member.embedded import EmbeddedEtcd
from store.memory import MemoryTransport
from store.mutate import mutate, mutate_status
from store.port import CreateRevisionGuard, Delete, Guard, Operation, Put, Transport
from tests.support.chaos_transports import WAYS, go
from tests.support.clock import HurriedClock
from tests.support.store_faults import FaultyTransport
from tests.support.waiting import until
from tests.support.world import deployment

KEY = keys.spec_key("ModelDeployment", "qwen")
STATUS_KEY = keys.status_key("ModelDeployment", "qwen")
CLOCK = SystemClock()


def noting(word: str) -> Callable[[ModelDeployment], ModelDeployment | None]:
    """Return a change that can be counted: each one has an identity in the document."""

    def change(obj: ModelDeployment) -> ModelDeployment | None:
        notes = {**obj.metadata.annotations, word: "done"}
        metadata = obj.metadata.model_copy(update={"annotations": notes})
        return obj.model_copy(update={"metadata": metadata})

    return change


def counting(obj: ModelDeployment) -> ModelDeployment:
    spec = obj.spec.model_copy(update={"replicas": obj.spec.replicas + 1})
    return obj.model_copy(update={"spec": spec})


async def written(transport: Transport) -> ModelDeployment:
    await transport.commit([], [codec.put_spec(deployment())])
    return await there(transport)


async def there(transport: Transport) -> ModelDeployment:
    obj = await objects.get(transport, ModelDeployment, "qwen")
    assert obj is not None
    return obj


async def test_a_change_is_written_and_returned(memory: MemoryTransport) -> None:
    before = await written(memory)
    after = await mutate(memory, CLOCK, ModelDeployment, "qwen", noting("a"))
    assert after == await there(memory)
    assert after.metadata.annotations == {"a": "done"}
    assert after.metadata.resource_version != before.metadata.resource_version


@pytest.mark.parametrize("change", [lambda obj: None, lambda obj: obj], ids=["none", "the same"])
async def test_nothing_to_do_writes_nothing(
    memory: MemoryTransport, change: Callable[[ModelDeployment], ModelDeployment | None]
) -> None:
    before = await written(memory)
    assert await mutate(memory, CLOCK, ModelDeployment, "qwen", change) == before
    assert await there(memory) == before


async def test_a_missing_object_is_named(memory: MemoryTransport) -> None:
    with pytest.raises(NotFoundError, match="there is no ModelDeployment qwen"):
        await mutate(memory, CLOCK, ModelDeployment, "qwen", noting("a"))
    with pytest.raises(NotFoundError):
        await mutate_status(memory, CLOCK, ModelDeployment, "qwen", lambda _: Status())


async def test_a_document_of_a_newer_release_is_not_overwritten(memory: MemoryTransport) -> None:
    _, bare = versions.split_version(codec.encode_spec(deployment()))
    newer = versions.version_of("ModelDeployment") + 1
    await memory.commit([], [Put(key=KEY, value=versions.stamp_version(bare, newer))])
    with pytest.raises(codec.NewerDocumentError, match="upgrade this process"):
        await mutate(memory, CLOCK, ModelDeployment, "qwen", noting("a"))
    await memory.commit([], [codec.put_spec(deployment())])
    newer = versions.version_of("ModelDeploymentStatus") + 1
    status = b'{"storedVersion":%d}' % newer
    await memory.commit([], [Put(key=STATUS_KEY, value=status)])
    with pytest.raises(codec.NewerDocumentError):
        await mutate_status(memory, CLOCK, ModelDeployment, "qwen", status_of)
    item = await memory.get(STATUS_KEY)
    assert item is not None
    assert item.value == status


def status_of(obj: ModelDeployment) -> ModelDeploymentStatus:
    before = obj.status.replicas if obj.status is not None else 0
    return ModelDeploymentStatus(observed_generation=1, replicas=before + obj.spec.replicas)


async def test_a_status_is_written_beside_its_spec(memory: MemoryTransport) -> None:
    await written(memory)
    spec = await memory.get(KEY)
    model_deployment = deployment()
    for expected in (1, 2):
        model_deployment = await mutate_status(memory, CLOCK, ModelDeployment, "qwen", status_of)
        assert model_deployment.status is not None
        assert (model_deployment.status.replicas, model_deployment) == (
            expected,
            await there(memory),
        )
    assert await memory.get(KEY) == spec
    before = await memory.get(STATUS_KEY)
    same = await mutate_status(memory, CLOCK, ModelDeployment, "qwen", lambda obj: obj.status)
    await mutate_status(memory, CLOCK, ModelDeployment, "qwen", lambda _: None)
    assert (same, await memory.get(STATUS_KEY)) == (model_deployment, before)


async def test_a_status_is_written_only_for_the_spec_it_was_computed_from(
    faulty: FaultyTransport,
) -> None:
    await written(faulty)
    edits = 1

    def change(obj: ModelDeployment) -> ModelDeploymentStatus:
        nonlocal edits
        if edits:
            edits -= 1
            faulty.inner._apply([codec.put_spec(counting(deployment()))])  # type: ignore[attr-defined]
        return status_of(obj)

    model_deployment = await mutate_status(faulty, CLOCK, ModelDeployment, "qwen", change)
    assert model_deployment.status is not None
    assert model_deployment.status.replicas == model_deployment.spec.replicas == 2


async def test_writers_of_one_object_lose_nothing(transport: Transport) -> None:
    await written(transport)
    async with asyncio.TaskGroup() as group:
        for n in range(8):
            group.create_task(mutate(transport, CLOCK, ModelDeployment, "qwen", noting(f"n{n}")))
    assert sorted((await there(transport)).metadata.annotations) == [f"n{n}" for n in range(8)]


@pytest.mark.parametrize("fault", ["answers_to_lose", "commits_to_lose"])
@pytest.mark.parametrize("times", [1, 3])
async def test_a_lost_answer_is_resolved(faulty: FaultyTransport, fault: str, times: int) -> None:
    await written(faulty)
    setattr(faulty, fault, times)
    after = await mutate(faulty, CLOCK, ModelDeployment, "qwen", counting)
    assert after.spec.replicas == 2
    assert after == await there(faulty)


class Interfering(FaultyTransport):
    """Others write (or delete) right after a commit whose answer is lost."""

    def __init__(self, inner: Transport, *others: Put | Delete, is_applied: bool = True) -> None:
        super().__init__(inner)
        self.others = others
        self.is_applied = is_applied
        self.compacts = False

    @override
    async def commit(self, guards: Sequence[Guard], operations: Sequence[Operation]) -> int:
        if not self.others:
            return await self.inner.commit(guards, operations)
        others, self.others = self.others, ()
        if self.is_applied:
            await self.inner.commit(guards, operations)
        for other in others:
            await self.inner.commit([], [other])
        if self.compacts:
            assert isinstance(self.inner, MemoryTransport)
            self.inner.compact()
        raise UnavailableError("no answer", ambiguous=True)


OTHERS = codec.put_spec(noting("other")(deployment()) or deployment())


@pytest.mark.parametrize("is_applied", [True, False])
async def test_history_tells_whether_a_write_was_applied(
    memory: MemoryTransport, *, is_applied: bool
) -> None:
    await written(memory)
    line = Interfering(
        memory, Put(key=f"{KEY}-2", value=b""), OTHERS, OTHERS, is_applied=is_applied
    )
    after = await mutate(line, CLOCK, ModelDeployment, "qwen", noting("mine"))
    # Written, and then overwritten without a read: it must not be written again.
    assert list(after.metadata.annotations) == (["other"] if is_applied else ["other", "mine"])
    assert after == await there(memory)


async def test_without_history_the_outcome_is_unknown(memory: MemoryTransport) -> None:
    await written(memory)
    line = Interfering(memory, OTHERS, OTHERS)
    line.compacts = True
    with pytest.raises(UnknownOutcomeError, match=r"cannot be known.*Read it") as caught:
        await mutate(line, CLOCK, ModelDeployment, "qwen", noting("mine"))
    assert caught.value.ambiguous


async def test_a_status_created_by_others_makes_the_outcome_unknown(
    memory: MemoryTransport,
) -> None:
    await written(memory)
    line = Interfering(memory, Put(key=STATUS_KEY, value=codec.encode(ModelDeploymentStatus())))
    with pytest.raises(UnknownOutcomeError):
        await mutate_status(line, CLOCK, ModelDeployment, "qwen", status_of)


async def test_an_object_deleted_after_a_lost_answer_is_not_found(memory: MemoryTransport) -> None:
    await written(memory)
    with pytest.raises(NotFoundError):
        await mutate(
            Interfering(memory, Delete(key=KEY)), CLOCK, ModelDeployment, "qwen", noting("mine")
        )


async def test_an_outage_ends_the_attempts(faulty: FaultyTransport) -> None:
    await written(faulty)
    faulty.commits_to_lose = 1000
    with pytest.raises(UnavailableError, match="10 attempts") as caught:
        await mutate(faulty, HurriedClock(), ModelDeployment, "qwen", noting("a"))
    assert caught.value.ambiguous
    faulty.leave()
    with pytest.raises(UnavailableError) as caught:
        await mutate(faulty, HurriedClock(), ModelDeployment, "qwen", noting("a"))
    assert not caught.value.ambiguous  # not even the read succeeded


async def test_repeated_conflicts_are_an_error(memory: MemoryTransport) -> None:
    await written(memory)

    def change(obj: ModelDeployment) -> ModelDeployment:
        memory._apply([codec.put_spec(counting(obj))])
        return noting("mine")(obj) or obj

    with pytest.raises(ConflictError, match="others changed it 10 times"):
        await mutate(memory, HurriedClock(), ModelDeployment, "qwen", change)


async def test_a_broken_fence_ends_the_attempts(memory: MemoryTransport) -> None:
    await written(memory)
    epoch = await memory.commit([], [Put(key="/leader", value=b"me")])
    fence = CreateRevisionGuard(key="/leader", create_revision=epoch)
    await mutate(memory, CLOCK, ModelDeployment, "qwen", noting("a"), guards=[fence])
    await memory.commit([], [Delete(key="/leader")])
    await memory.commit([], [Put(key="/leader", value=b"another")])
    before = await there(memory)
    for attempt in (
        mutate(memory, CLOCK, ModelDeployment, "qwen", noting("late"), guards=[fence]),
        mutate_status(memory, CLOCK, ModelDeployment, "qwen", status_of, guards=[fence]),
    ):
        with pytest.raises(FencedError):
            await attempt
    assert await there(memory) == before


@pytest.mark.etcd
@pytest.mark.parametrize("way", WAYS)
async def test_changes_survive_kills_of_etcd(etcd: EmbeddedEtcd, way: str) -> None:
    """Every acknowledged change is there exactly once; every other one is known to be missing."""
    transport = go(way, etcd.address)
    await transport.commit([], [codec.put_spec(deployment())])
    acknowledged: set[str] = set()

    async def work(worker: int) -> None:
        for n in range(15):
            word = f"w{worker}-{n}"
            while word not in acknowledged:
                try:
                    await mutate(transport, CLOCK, ModelDeployment, "qwen", noting(word))
                    acknowledged.add(word)
                except StoreError:
                    continue

    async with asyncio.TaskGroup() as group:
        keeping = group.create_task(etcd.supervisor.run())
        async with asyncio.TaskGroup() as load:
            for worker in range(4):
                load.create_task(work(worker))
            for due in (15, 35):
                await until(lambda due=due: len(acknowledged) > due, limit_s=20)  # type: ignore[misc]
                assert etcd.supervisor.pid
                os.kill(etcd.supervisor.pid, signal.SIGKILL)
        keeping.cancel()
    model_deployment = await there(transport)
    await transport.close()
    assert set(model_deployment.metadata.annotations) == acknowledged
    assert len(acknowledged) == 60
