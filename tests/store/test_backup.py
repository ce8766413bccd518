"""Tests of `store.backup`, on a real etcd: complete or detected, with interruptions and concurrent writers."""

import asyncio
import io
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime

import pytest
from typing_extensions import override

from machinery.clock import SystemClock
from store import keys
from store.archive import ArchiveEntry, ArchiveError, ArchiveHeader, ArchiveReader, ArchiveWriter
from store.backup import PREFIX, HalfRestoredError, RestoreRefusedError, restore, save
from store.errors import ConflictError, UnavailableError
from store.etcd.connect import connect
from store.etcd.member.embedded import EmbeddedEtcd
from store.leases import Election
from store.port import Delete, Guard, Operation, Put, Transport
from tests.support.clock import HastyClock
from tests.support.etcd import running_etcd
from tests.support.store_faults import FaultyTransport

pytestmark = pytest.mark.etcd


CLOCK = HastyClock()


@pytest.fixture(scope="module")
async def own_etcd(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EmbeddedEtcd]:
    async with running_etcd(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd


@pytest.fixture
async def there(own_etcd: EmbeddedEtcd) -> AsyncIterator[FaultyTransport]:
    """A store without keys of the fleet."""
    transport = FaultyTransport(connect(own_etcd.address))
    items = (await transport.list(PREFIX)).items
    for start in range(0, len(items), 128):
        batch = items[start : start + 128]
        await transport.commit([], [Delete(key=item.key) for item in batch])
    yield transport
    await transport.close()


def archive(
    count: int, *, mark: str = "", prefix: str = PREFIX, folder: str = "spec/NodePool/"
) -> ArchiveReader:
    """Return a backup of so many objects."""
    file = io.BytesIO()
    header = ArchiveHeader(
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        fleet_version="0.1.0",
        etcd_version="3.5.16",
        store="1",
        revision=1,
        prefix=prefix,
    )
    writer = ArchiveWriter(file, header)
    for number in range(count):
        writer.add(f"{prefix}{folder}n{number:06}", f'{{"mark":"{mark}"}}'.encode())
    writer.finish()
    return ArchiveReader(file)


async def content(transport: Transport) -> list[ArchiveEntry]:
    """Return every key of the store, including the restore's own ones."""
    listing = await transport.list(PREFIX)
    return [ArchiveEntry(key=item.key, value=item.value) for item in listing.items]


async def saved(transport: Transport) -> ArchiveReader:
    file = io.BytesIO()
    await save(transport, file, now=CLOCK.now(), fleet_version="0.1.0")
    return ArchiveReader(file)


async def test_a_restore_brings_back_everything_but_leased_keys(there: FaultyTransport) -> None:
    lease = await there.grant(60)
    kept = {
        keys.spec_key("NodePool", "a"): b'{"a":1}',
        keys.status_key("NodePool", "a"): b"",
        f"{PREFIX}another/thing": b"\xff\x00",
    }
    leased = {keys.node_lease_key("n"): b"x", f"{PREFIX}any/where": b"x"}
    await there.commit([], [Put(key=key, value=value) for key, value in kept.items()])
    await there.commit([], [Put(key=k, value=v, lease=lease) for k, v in leased.items()])
    await there.commit([], [Put(key="/elsewhere", value=b"theirs")])
    backup = await saved(there)
    assert {entry.key: entry.value for entry in backup.entries()} == kept
    await there.revoke(lease)
    for key in kept:
        await there.commit([], [Delete(key=key)])
    await restore(there, backup, CLOCK)
    assert {entry.key: entry.value for entry in await content(there)} == kept
    assert await there.get("/elsewhere") is not None


async def test_many_and_large_objects_are_restored(there: FaultyTransport) -> None:
    sizes = [1_400_000, 10, 600_000, 600_000, *[100] * 700]
    for number, size in enumerate(sizes):
        key = keys.spec_key("NodePool", f"n{number:04}")
        await there.commit([], [Put(key=key, value=b"x" * size)])
    before = await content(there)
    backup = await saved(there)
    await restore(there, backup, CLOCK, replace=True)
    assert await content(there) == before


async def test_a_store_that_is_not_empty_is_refused(there: FaultyTransport) -> None:
    await there.commit([], [Put(key=keys.spec_key("NodePool", "a"), value=b"old")])
    before = await content(there)
    with pytest.raises(RestoreRefusedError, match=r"has 1 keys of a fleet.*--force"):
        await restore(there, archive(3), CLOCK)
    assert await content(there) == before
    await restore(there, archive(3), CLOCK, replace=True)
    assert await content(there) == list(archive(3).entries())


@pytest.mark.parametrize("key", [keys.node_lease_key("mac-1"), keys.ELECTION_RECONCILER])
async def test_the_store_of_a_running_fleet_is_refused(there: FaultyTransport, key: str) -> None:
    lease = await there.grant(60)
    await there.commit([], [Put(key=key, value=b"x", lease=lease)])
    before = await content(there)
    for replace in (False, True):
        with pytest.raises(
            RestoreRefusedError, match=r"a fleet runs on this store \((mac-1|reconciler)\)"
        ):
            await restore(there, archive(3), CLOCK, replace=replace)
    assert await content(there) == before
    await there.revoke(lease)


async def test_a_damaged_or_foreign_file_changes_nothing(there: FaultyTransport) -> None:
    damaged = archive(300)
    damaged._file.seek(-200, 2)
    damaged._file.write(b"?")
    # Such a token had no lease and no end, and the Mac was alive for ever.
    forged = [archive(1, folder=one) for one in ("secret/JoinToken/", "lease/Node/", "election/")]
    for bad in (damaged, archive(3, prefix="/other/v1/"), *forged):
        with pytest.raises((ArchiveError, RestoreRefusedError)):
            await restore(there, bad, CLOCK)
        assert await content(there) == []


@pytest.mark.parametrize("before", range(6))
async def test_a_lost_answer_does_not_stop_it(there: FaultyTransport, before: int) -> None:
    """For the first write, one in the middle, and the last."""
    losing = Losing(there.inner, after=before)
    await restore(losing, archive(400), CLOCK)
    assert losing.commits > before
    assert await content(there) == list(archive(400).entries())


class Losing(FaultyTransport):
    """Loses the answer to one commit; or becomes unavailable for good before it."""

    def __init__(self, inner: Transport, *, after: int, leaves: bool = False) -> None:
        super().__init__(inner)
        self.commits = 0
        self._after = after
        self._leaves = leaves

    @override
    async def commit(self, guards: Sequence[Guard], operations: Sequence[Operation]) -> int:
        if self.commits == self._after:
            if self._leaves:
                self.leave()
            else:
                self.answers_to_lose = 1
        self.commits += 1
        return await super().commit(guards, operations)


async def broken_off(there: FaultyTransport, reader: ArchiveReader) -> None:
    """Restore, and lose the store for good after 256 keys."""
    with pytest.raises(UnavailableError):
        await restore(Losing(there.inner, after=3, leaves=True), reader, CLOCK)
    assert len((await there.list(keys.SPEC_PREFIX)).items) == 256


async def test_an_interrupted_restore_is_noticed_and_completed(there: FaultyTransport) -> None:
    await broken_off(there, archive(1000))
    with pytest.raises(HalfRestoredError, match="run `fleetctl restore` again"):
        await saved(there)
    with pytest.raises(
        RestoreRefusedError, match="of another file into this store was interrupted"
    ):
        await restore(there, archive(999), CLOCK)
    await restore(there, archive(1000), CLOCK)
    assert await content(there) == list(archive(1000).entries())


async def test_an_interrupted_restore_can_be_replaced(there: FaultyTransport) -> None:
    await broken_off(there, archive(1000))
    await restore(there, archive(10, mark="another"), CLOCK, replace=True)
    assert await content(there) == list(archive(10, mark="another").entries())


async def test_no_reconciler_leads_over_an_incomplete_fleet(there: FaultyTransport) -> None:
    reader = archive(1000)
    await broken_off(there, reader)
    election = Election(there, SystemClock(), key=keys.ELECTION_RECONCILER, ttl_s=3)
    async with asyncio.TaskGroup() as group:
        campaign = group.create_task(election.campaign("reconciler"))
        await asyncio.sleep(0.3)
        assert not campaign.done()
        await restore(there, reader, CLOCK)
        leadership = await asyncio.wait_for(campaign, 30)
    assert leadership.valid()
    await leadership.resign()


async def test_of_two_concurrent_restores_one_fails(there: FaultyTransport) -> None:
    async def one() -> Exception | None:
        try:
            await restore(there, archive(2000), CLOCK)
        except (ConflictError, RestoreRefusedError) as error:
            return error
        return None

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one()) for _ in range(2)]
    assert [task.result() for task in tasks].count(None) == 1
    assert await content(there) == list(archive(2000).entries())


async def test_a_backup_has_one_revision(there: FaultyTransport) -> None:
    """Even if keys are written between its pages."""
    await restore(there, archive(1200), CLOCK)
    before = await content(there)
    turn = 0

    async def write() -> None:
        nonlocal turn
        turn += 1
        for number in (0, 600, 1199):
            key = keys.spec_key("NodePool", f"n{number:06}")
            await there.commit([], [Put(key=key, value=f"turn {turn}".encode())])

    there.between_pages = write
    backup = await saved(there)
    assert turn > 1
    assert list(backup.entries()) == before
