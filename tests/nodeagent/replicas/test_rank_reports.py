"""A node's reports of its ranks: one key at a time, and no longer than it has the rank."""

import pytest

from nodeagent.replicas.rank_reports import RankReports
from schemas.replica import RankStatus, Replica
from store import codec, keys
from store.memory import MemoryTransport
from store.port import Put
from tests.support.clock import FakeClock
from tests.support.nodeagent_groups import group
from tests.support.values import present


class Store:
    """A store with one group in it."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.transport = MemoryTransport(self.clock)

    def reports(self) -> RankReports:
        """Return a new run of node a's."""
        return RankReports(self.transport, self.clock, "a")

    async def assign(self, *nodes: str, epoch: int) -> Replica:
        await self.transport.commit([], [codec.put_spec(group(*nodes, epoch=epoch))])
        item = present(await self.transport.get(keys.spec_key("Replica", "qwen-0")))
        return codec.decode_object(Replica, item)

    async def there(self) -> list[str]:
        """Return the ranks that node a reports of."""
        listing = await self.transport.list(keys.rank_prefix("a"))
        return [item.key.removeprefix(keys.rank_prefix("a")) for item in listing.items]


def status(epoch: int) -> RankStatus:
    return RankStatus(replica_uid="u1", node="a", epoch=epoch)


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_another_rank_takes_the_place_of_the_one_before(*, is_restarted: bool) -> None:
    store = Store()
    reports = store.reports()
    first = await store.assign("a", "b", epoch=1)
    assert await reports.read(first, 0) is None
    await reports.write(first, 0, status(1))
    assert await store.there() == ["qwen-0/0"]
    second = await store.assign("b", "a", epoch=2)
    if is_restarted:
        reports = store.reports()
    assert await reports.read(second, 1) is None
    await reports.write(second, 1, status(2))
    assert await store.there() == ["qwen-0/1"]
    assert await reports.read(second, 1) == status(2)


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_rank_that_moved_away_is_not_reported(*, is_restarted: bool) -> None:
    store = Store()
    reports = store.reports()
    first = await store.assign("a", "b", epoch=1)
    await reports.read(first, 0)
    await reports.write(first, 0, status(1))
    if is_restarted:
        reports = store.reports()
    await reports.retract("other-0")
    assert await store.there() == ["qwen-0/0"]
    await reports.retract("qwen-0")
    assert await store.there() == []
    # And it can come back.
    reports.forget("qwen-0")
    third = await store.assign("a", "b", epoch=3)
    await reports.read(third, 0)
    await reports.write(third, 0, status(3))
    assert await store.there() == ["qwen-0/0"]


async def test_a_status_of_a_newer_agent_is_not_overwritten() -> None:
    store = Store()
    key = keys.rank_key("a", "qwen-0", 0)
    await store.transport.commit([], [Put(key=key, value=b'{"storedVersion":9}')])
    reports = store.reports()
    first = await store.assign("a", "b", epoch=1)
    assert await reports.read(first, 0) is None
    await reports.write(first, 0, status(1))
    item = present(await store.transport.get(key))
    assert b"storedVersion" in item.value
