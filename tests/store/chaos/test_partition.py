"""Members are cut off under load, from each other or from their clients, by network namespaces.

Where no namespaces can be made (no root, no Linux), a frozen member stands for one that is cut off.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from store.errors import UnavailableError
from store.port import Put
from tests.support.chaos_load import PROGRESS, Load, loaded
from tests.support.chaos_transports import going
from tests.support.cluster import LOOPBACK, Cluster, Member, running_cluster
from tests.support.netns import Networks, available

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(300)]

FLAGS = (PROGRESS, "--heartbeat-interval=50", "--election-timeout=500")


@dataclass(frozen=True, slots=True)
class Divided:
    """A cluster that can be partitioned; without network namespaces its members are frozen instead."""

    cluster: Cluster
    networks: Networks | None

    @asynccontextmanager
    async def _without(self, member: Member, leg: str) -> AsyncIterator[None]:
        """Cut the member's link to `peers` or `clients` during the block."""
        number = self.cluster.members.index(member)
        if self.networks is None:
            cut, mend = member.freeze, member.thaw
        else:
            cut = partial(getattr(self.networks, f"cut_{leg}"), number)
            mend = partial(getattr(self.networks, f"mend_{leg}"), number)
        cut()
        try:
            yield
        finally:
            mend()

    def from_peers(self, member: Member) -> AbstractAsyncContextManager[None]:
        return self._without(member, "peers")

    def from_clients(self, member: Member) -> AbstractAsyncContextManager[None]:
        return self._without(member, "clients")

    @asynccontextmanager
    async def from_all(self, member: Member) -> AsyncIterator[None]:
        async with self.from_peers(member):
            if self.networks is None:
                yield
                return
            async with self.from_clients(member):
                yield


@pytest.fixture(scope="module")
async def divided(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Divided]:
    folder: Path = tmp_path_factory.mktemp("divided")
    with ExitStack() as stack:
        networks = stack.enter_context(Networks(3).made()) if available() else None
        places = [networks.place(n) for n in range(3)] if networks else LOOPBACK
        async with running_cluster(folder, *FLAGS, places=places) as cluster:
            yield Divided(cluster, networks)


async def divide(load: Load, divided: Divided, *, leaders: bool, what: str) -> None:
    """Cut one member off and reconnect it; the cluster serves all the time."""
    leader = await divided.cluster.leader()
    member = leader if leaders else (await divided.cluster.followers())[0]
    async with load.leases():
        async with getattr(divided, what)(member):
            await load.goes_on()
        await divided.cluster.serves()
        await load.goes_on()


@pytest.mark.ci
async def test_a_partitioned_client_loses_nothing(way: str, divided: Divided, corner: str) -> None:
    await divided.cluster.serves()
    async with loaded(way, divided.cluster, corner) as load:
        await divide(load, divided, leaders=True, what="from_peers")
        await divide(load, divided, leaders=True, what="from_clients")
        await divide(load, divided, leaders=False, what="from_all")


@pytest.mark.ci
async def test_a_lagging_member_is_not_taken_for_another_store(
    way: str, divided: Divided, corner: str
) -> None:
    """Its revision is lower than the one seen elsewhere, but will catch up."""
    await divided.cluster.serves()
    lagging = (await divided.cluster.followers())[0]
    number = divided.cluster.members.index(lagging)
    async with (
        going(way, divided.cluster.address(number + 1), idle_s=3) as there,
        going(way, divided.cluster.address(number), idle_s=3) as here,
    ):
        await there.get(corner)
        await here.get(corner)  # a connection is open already
        async with divided.from_peers(lagging):
            after = 0
            for _ in range(20):
                after = await there.commit([], [Put(key=f"{corner}a", value=b"before")])
            if divided.networks is None:
                lagging.thaw()
            try:
                async with (
                    asyncio.timeout(30),
                    aclosing(here.watch(corner, after_revision=after)) as w,
                ):
                    await anext(w)
            except UnavailableError:
                pass  # it knows that it is isolated
            if divided.networks is None:
                lagging.freeze()
        await divided.cluster.serves()
        revision = await there.commit([], [Put(key=f"{corner}a", value=b"after")])
        async with asyncio.timeout(30), aclosing(here.watch(corner, after_revision=after)) as watch:
            async for batch in watch:
                if batch.changes:
                    assert [c.mod_revision for c in batch.changes] == [revision]
                    break


@pytest.mark.full
async def test_a_link_that_loses_packets_loses_no_write_and_no_lease(
    way: str, divided: Divided, corner: str
) -> None:
    if divided.networks is None or shutil.which("nft") is None:
        pytest.skip("needs network namespaces, and nftables")
    await divided.cluster.serves()
    async with loaded(way, divided.cluster, corner) as load, load.leases():
        with divided.networks.packet_loss(1) as dropped:
            while dropped() < 20 or not all(writer.done for writer in load.writers):
                await load.goes_on()
