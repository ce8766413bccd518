"""Registration of a node: its name, other holders of it, and sessions."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from nodeagent.node.registration import NameTakenError, NodeRegistration, is_withdrawn, session_name
from schemas.node import NodeLease
from store import codec, keys
from store.memory import MemoryTransport
from store.port import Delete, KeyValue, Put
from tests.support.assignments import replica, write
from tests.support.clock import FakeClock
from tests.support.macs import mac_status
from tests.support.values import present


async def held_by(uid: str, session: str) -> NodeRegistration:
    """Return the registration of (u, folder/2) in a store where the given holder has the name."""
    clock = FakeClock()
    transport = MemoryTransport(clock)
    value = codec.encode(NodeLease(uid=uid, session=session))
    await transport.commit([], [Put(key=keys.node_lease_key("n"), value=value)])
    return NodeRegistration(
        transport, clock, node="n", lease=NodeLease(uid="u", session="folder/2")
    )


@pytest.mark.parametrize(("uid", "session", "words"), [
    ("other", "folder/1", "another identity"),
    ("u", "elsewhere/1", "another --state-dir"),
    ("u", "1", "another --state-dir"),
])  # fmt: skip
async def test_a_name_of_another_agent_is_refused(uid: str, session: str, words: str) -> None:
    presence = await held_by(uid, session)
    with pytest.raises(NameTakenError, match=words):
        await presence.keep(lambda: None)
    assert presence.lease is None


async def test_a_name_that_another_version_held_is_taken_when_its_lease_ends() -> None:
    clock = FakeClock()
    transport = MemoryTransport(clock)
    lease = await transport.grant(4)
    newer = Put(key=keys.node_lease_key("n"), value=b'{"storedVersion":9}', lease=lease)
    await transport.commit([], [newer])
    presence = NodeRegistration(
        transport, clock, node="n", lease=NodeLease(uid="u", session="folder/2")
    )
    async with asyncio.TaskGroup() as group:
        keeping = group.create_task(presence.keep(lambda: None))
        await clock.advance(2)
        before = await transport.get(newer.key)
        await clock.advance(4)
        after = await transport.get(newer.key)
        keeping.cancel()
    assert before is not None
    assert before.value == newer.value
    assert after is not None
    assert codec.decode(NodeLease, after).session == "folder/2"


class CountingTransport(MemoryTransport):
    """A store that counts the reads of a status."""

    reads = 0

    @override
    async def get(self, key: str) -> KeyValue | None:
        self.reads += key == STATUS_KEY
        return await super().get(key)


STATUS_KEY = keys.status_key("Node", "n")


async def test_a_status_is_read_once_and_written_again_after_it_was_deleted() -> None:
    clock = FakeClock()
    store = CountingTransport(clock)
    registration = NodeRegistration(store, clock, node="n", lease=NodeLease(uid="u", session="f/1"))
    status = mac_status("n")
    for chip in ("M3", "M4"):
        status = status.model_copy(update={"uid": "u", "chip": chip})
        for _ in range(100):
            await registration.describe(status)
            await clock.advance(10)
        assert await registration.described() == status
    assert store.reads == 1
    status_key = present(await store.get(STATUS_KEY))
    assert status_key.create_revision < status_key.mod_revision
    await store.commit([], [Delete(key=STATUS_KEY)])
    await clock.advance(60)
    await registration.describe(status)
    again = present(await store.get(STATUS_KEY))
    assert again.value == status_key.value


@given(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1),
    st.integers(1, 2**22),
)
def test_a_folder_has_one_name_for_all_runs(folder: str, pid: int) -> None:
    path = Path("/") / folder
    name, _, run = session_name(path, pid).partition("/")
    assert (len(name), run) == (12, str(pid))
    assert session_name(path, pid + 1).startswith(f"{name}/")
    assert not session_name(path / "other", pid).startswith(name)


async def test_a_replica_is_withdrawn_once_it_concerns_another_node_only() -> None:
    store = MemoryTransport(FakeClock())
    assert await is_withdrawn(store, "qwen-0", "a")
    await write(store, replica("qwen-0", "b", leaving=("a",)))
    assert not await is_withdrawn(store, "qwen-0", "a")
    await write(store, replica("qwen-0", "b"))
    assert await is_withdrawn(store, "qwen-0", "a")
    # A restore may not have come to it yet, and what a newer mlx-fleet wrote may be ours.
    await store.commit([], [Put(key=keys.RESTORING, value=b"{}")])
    assert not await is_withdrawn(store, "qwen-0", "a")
    unknown = Put(key=keys.spec_key("Replica", "qwen-0"), value=b'{"version":999}')
    await store.commit([], [Delete(key=keys.RESTORING), unknown])
    assert not await is_withdrawn(store, "qwen-0", "a")
