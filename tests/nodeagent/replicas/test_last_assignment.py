"""The last assignment on the agent's disk: what is kept, what is refused, and when the store takes over."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from typing_extensions import override

from machinery.clock import SystemClock
from nodeagent.replicas.last_assignment import (
    MAX_AGE,
    AssignedReplicas,
    AssignmentError,
    AssignmentFile,
)
from schemas.meta import ObjectMeta
from schemas.replica import Replica
from store import codec, keys
from store.informer import Informer
from store.memory import MemoryTransport
from tests.support.nodeagent_groups import group
from tests.support.nodeagent_plans import NOW, wanted
from tests.support.store_faults import FaultyTransport
from tests.support.waiting import until

CLOCK = SystemClock()
KEY = keys.spec_key("Replica", "qwen-0")


def file_in(folder: Path, **fields: str) -> AssignmentFile:
    return AssignmentFile(path=folder / "assignment.json", **{"node": "a", "uid": "n1", **fields})


# A file of this node whose replica is damaged.
DAMAGED = b'{"format":1,"node":"a","uid":"n1","confirmedAt":"2026-01-01T00:00:00+00:00","replicas":{"qwen-0":[7,"{}"]}}'


def names(file: AssignmentFile) -> list[str]:
    return [replica.name for replica in file.read(NOW).values()]


def stored(replica: Replica, version: int = 7) -> Replica:
    return codec.with_version(replica, version)


def test_a_saved_assignment_is_read_as_it_was(tmp_path: Path) -> None:
    file = file_in(tmp_path)
    file.save([stored(wanted())], NOW)
    assert file.read(NOW) == {KEY: stored(wanted())}
    # Endpoints and reports are written only while the assignment is the same.
    assert file.read(NOW)[KEY].metadata.resource_version == "7"
    assert file.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("replica", [
    pytest.param(group(), id="a-rank-whose-epoch-may-be-over"),
    pytest.param(wanted(is_deleting=True), id="a-replica-that-was-to-end"),
])  # fmt: skip
def test_some_replicas_are_never_served_without_the_store(tmp_path: Path, replica: Replica) -> None:
    file = file_in(tmp_path)
    file.save([stored(replica)], NOW)
    assert names(file) == []


@pytest.mark.parametrize(("later", "why"), [
    (timedelta(0), ""), (MAX_AGE, ""),
    (MAX_AGE + timedelta(seconds=1), "more than 7 days ago"),
    (-timedelta(minutes=5), ""),
    (-timedelta(minutes=6), "from the future"),
])  # fmt: skip
def test_an_assignment_is_served_for_a_week(tmp_path: Path, later: timedelta, why: str) -> None:
    file = file_in(tmp_path)
    file.save([stored(wanted())], NOW)
    if not why:
        assert file.read(NOW + later)
        return
    with pytest.raises(AssignmentError, match=why):
        file.read(NOW + later)


@pytest.mark.parametrize(
    "reader", [{"node": "b"}, {"uid": "n2"}], ids=["another-name", "another-machine"]
)
def test_assignment_of_another_node_is_not_served(tmp_path: Path, reader: dict[str, str]) -> None:
    file_in(tmp_path).save([stored(wanted())], NOW)
    with pytest.raises(AssignmentError, match="another identity"):
        file_in(tmp_path, **reader).read(NOW)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[1]", b"null", b'{"format":2}', b"\xff", b'{"format":1,"node":"a"}', DAMAGED],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    file = file_in(tmp_path)
    file.path.write_bytes(content)
    with pytest.raises(AssignmentError):
        file.read(NOW)


@asynccontextmanager
async def running(store: FaultyTransport, file: AssignmentFile) -> AsyncIterator[AssignedReplicas]:
    informer = Informer(
        store, keys.spec_prefix("Replica"), lambda item: codec.decode_object(Replica, item), CLOCK
    )
    made = AssignedReplicas(informer, file, CLOCK)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(made.run())
        yield made
        task.cancel()


async def test_the_file_follows_the_store(tmp_path: Path) -> None:
    store, file = FaultyTransport(MemoryTransport(CLOCK)), file_in(tmp_path)

    def saved() -> list[str]:
        return (
            [replica.name for replica in file.read(CLOCK.now()).values()]
            if file.path.exists()
            else ["?"]
        )

    async with running(store, file):
        await until(lambda: saved() == [])
        await store.commit([], [codec.put_spec(wanted())])
        await until(lambda: saved() == ["qwen-0"])
        await store.commit([], [codec.put_spec(wanted(is_deleting=True))])
        await until(lambda: saved() == [])


@dataclass(frozen=True, kw_only=True)
class SlowFile(AssignmentFile):
    """A file on a disk that is slow to confirm: writing it ends when the test says so."""

    is_written: threading.Event = field(default_factory=threading.Event)
    may_end: threading.Event = field(default_factory=threading.Event)

    @override
    def save(self, replicas: Iterable[Replica], confirmed_at: datetime) -> None:
        replicas = tuple(replicas)
        super().save(replicas, confirmed_at)
        if replicas:
            self.is_written.set()
            self.may_end.wait(10)


async def test_a_replica_that_is_withdrawn_while_the_file_is_written(tmp_path: Path) -> None:
    store = FaultyTransport(MemoryTransport(CLOCK))
    file = SlowFile(path=tmp_path / "assignment.json", node="a", uid="n1")
    async with running(store, file) as replicas:
        await store.commit([], [codec.put_spec(wanted())])
        await until(file.is_written.is_set)
        await store.commit([], [codec.put_spec(wanted(is_deleting=True))])
        await until(lambda: replicas.items[KEY].metadata.deletion_timestamp is not None)
        file.may_end.set()
        await until(lambda: not file.read(CLOCK.now()))


async def test_the_store_takes_over_when_it_is_back(tmp_path: Path) -> None:
    store, file = FaultyTransport(MemoryTransport(CLOCK)), file_in(tmp_path)
    other = wanted().model_copy(update={"metadata": ObjectMeta(name="other-0", uid="u2")})
    file.save([stored(wanted()), stored(other)], CLOCK.now())
    await store.commit([], [codec.put_spec(wanted())])
    store.leave()
    changed: list[str] = []
    async with running(store, file) as replicas:
        replicas.on_change(changed.append)
        assert not replicas.items
        assert replicas.stand_alone() == 2
        assert changed == [KEY, keys.spec_key("Replica", "other-0")]
        assert set(replicas.items) == set(changed)
        assert not replicas.synced
        changed.clear()
        store.come_back()
        # What was withdrawn is looked at as well, though the store does not tell of it.
        await until(lambda: set(changed) == {KEY, keys.spec_key("Replica", "other-0")})
        assert set(replicas.items) == {KEY}
        await until(lambda: set(file.read(CLOCK.now())) == {KEY})


async def test_nothing_is_served_without_a_file(tmp_path: Path) -> None:
    store = FaultyTransport(MemoryTransport(CLOCK))
    store.leave()
    async with running(store, file_in(tmp_path)) as replicas:
        assert replicas.stand_alone() == 0
        assert not replicas.items
