"""Copies of Replicas below their nodes: they follow every change, survive faults, and are repaired by a new leader."""

from collections.abc import Sequence

import pytest
from typing_extensions import override

from machinery.clock import SystemClock
from store import codec, keys
from store.errors import ConflictError, PermissionDeniedError
from store.memory import MemoryTransport
from store.port import Delete, Guard, Operation, Put
from tests.support.assignments import (
    copies_in,
    is_marked,
    leading,
    replica,
    until_copied,
    write,
)
from tests.support.nodeagent_plans import NOW
from tests.support.store_faults import FaultyTransport
from tests.support.waiting import until, until_async

CLOCK = SystemClock()


async def test_copies_follow_a_replica_and_have_its_version() -> None:
    store = MemoryTransport(CLOCK)
    async with leading(store):
        await until_async(lambda: is_marked(store))
        await write(store, replica("qwen-0", "a"))
        replicas = await until_copied(store, "a/qwen-0")
        # An agent's write that is guarded by its copy must succeed.
        await store.commit([codec.unchanged_guard(replicas["a/qwen-0"])], [Put(key="x", value=b"")])
        await write(store, replica("qwen-0", "b", "c", leaving=("a",)))
        replicas = await until_copied(store, "a/qwen-0", "b/qwen-0", "c/qwen-0")
        # A person deletes it: the reconciler did not write this.
        deleted = replicas["c/qwen-0"].metadata.model_copy(update={"deletion_timestamp": NOW})
        await write(store, replica("qwen-0", "c").model_copy(update={"metadata": deleted}))
        replicas = await until_copied(store, "c/qwen-0")
        assert replicas["c/qwen-0"].metadata.deletion_timestamp == NOW
        await store.commit([], [Delete(key=keys.spec_key("Replica", "qwen-0"))])
        await until_copied(store)
    assert not await is_marked(store)


async def test_a_new_leader_repairs_what_is_wrong_and_writes_nothing_else() -> None:
    store = MemoryTransport(CLOCK)
    await write(store, replica("good-0", "a"))
    async with leading(store):
        await until_copied(store, "a/good-0")
    right = await store.get(keys.assignment_key("a", "good-0"))
    early = [
        Put(key=keys.assignment_key("a", name), value=codec.encode_copy(replica(name, "a")))
        for name in ("gone-0", "old-0", "moved-0")
    ]
    await store.commit([], [*early, Put(key=keys.assignment_key("a", "bad-0"), value=b"{")])
    await write(store, replica("old-0", "a"), replica("moved-0", "b"), replica("bad-0", "a"))
    async with leading(store):
        await until_copied(store, "a/good-0", "a/old-0", "b/moved-0", "a/bad-0")
        await until_async(lambda: is_marked(store))
    assert await store.get(keys.assignment_key("a", "good-0")) == right


async def test_a_lost_answer_and_an_outage_leave_the_copies_right() -> None:
    inner = MemoryTransport(CLOCK)
    store = FaultyTransport(inner)
    async with leading(store):
        await until_async(lambda: is_marked(inner))
        store.answers_to_lose = 1
        await write(inner, *(replica(f"qwen-{n}", "a") for n in range(100)))
        await until_copied(inner, *(f"a/qwen-{n}" for n in range(100)))
        store.commits_to_lose = 2
        await write(inner, replica("qwen-0", "b"))
        await until_copied(inner, "b/qwen-0", *(f"a/qwen-{n}" for n in range(1, 100)))


class RefusingTransport(MemoryTransport):
    """Counts conflicts, and refuses writes of copies as etcd does for a role without that right."""

    def __init__(self) -> None:
        super().__init__(CLOCK)
        self.conflicts = self.refusals = 0
        self.has_right = True

    @override
    async def commit(self, guards: Sequence[Guard], operations: Sequence[Operation]) -> int:
        written = (keys.ASSIGNMENT_PREFIX, keys.ASSIGNMENTS_KEPT)
        if not self.has_right and any(
            operation.key.startswith(written) for operation in operations
        ):
            self.refusals += 1
            raise PermissionDeniedError("permission denied")
        try:
            return await super().commit(guards, operations)
        except ConflictError:
            self.conflicts += 1
            raise


async def test_a_former_leader_writes_no_copy() -> None:
    store = RefusingTransport()
    async with leading(store):
        await until_async(lambda: is_marked(store))
        await store.commit([], [Delete(key=keys.ELECTION_RECONCILER)])
        await store.commit([], [Put(key=keys.ELECTION_RECONCILER, value=b"host/2 0.0.9")])
        await write(store, replica("qwen-0", "a"))
        await until(lambda: store.conflicts > 1)
        assert await copies_in(store) == {}


async def test_without_the_right_there_is_no_mark_until_it_is_granted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = RefusingTransport()
    store.has_right = False
    async with leading(store):
        await write(store, replica("qwen-0", "a"))
        await until(lambda: store.refusals > 1)
        assert not await is_marked(store)
        warned = [record for record in caplog.records if record.levelname == "WARNING"]
        assert [log_record.__dict__.get("do") for log_record in warned] == [
            "fleetctl init-auth --prepare"
        ]
        store.has_right = True
        await until_copied(store, "a/qwen-0")
        await until_async(lambda: is_marked(store))
