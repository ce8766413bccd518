"""Members of a cluster are killed and frozen under load: no write is lost, no event is missed."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from machinery.clock import SystemClock
from store.errors import UnavailableError
from store.etcd.adapter import CALL_S
from store.port import Transport
from tests.support.chaos_load import PROGRESS, Load, loaded
from tests.support.chaos_transports import going
from tests.support.cluster import Cluster, Member, running_cluster

pytestmark = [pytest.mark.ci, pytest.mark.etcd, pytest.mark.timeout(300)]

# The loss of a leader is noticed after half a second instead of one.
FLAGS = (PROGRESS, "--heartbeat-interval=50", "--election-timeout=500")


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path_factory.mktemp("cluster"), *FLAGS) as made:
        yield made


@asynccontextmanager
async def killed(member: Member) -> AsyncIterator[None]:
    await member.kill()
    try:
        yield
    finally:
        await member.start()


@asynccontextmanager
async def frozen(member: Member) -> AsyncIterator[None]:
    member.freeze()
    try:
        yield
    finally:
        member.thaw()


FAULTS = {"killed": killed, "frozen": frozen}


async def hurt_one(load: Load, cluster: Cluster, fault: str, member: Member) -> None:
    """Take one member away and bring it back; the cluster serves all the time."""
    async with load.leases():
        async with FAULTS[fault](member):
            await load.goes_on()
        await cluster.serves()
        await load.goes_on()


async def hurt_two(load: Load, cluster: Cluster, fault: str, members: Sequence[Member]) -> None:
    """Take the quorum away and bring it back; only then does the cluster serve again."""
    async with AsyncExitStack() as away:
        for member in members:
            await away.enter_async_context(FAULTS[fault](member))
        await load.notices()
    await cluster.serves()
    await load.goes_on()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("times", [1, pytest.param(30, marks=pytest.mark.soak)])
async def test_killed_and_frozen_members_lose_nothing(
    way: str, fault: str, times: int, cluster: Cluster, corner: str
) -> None:
    await cluster.serves()
    async with loaded(way, cluster, corner) as load:
        for turn in range(times):
            await hurt_one(load, cluster, fault, await cluster.leader())
            await hurt_one(load, cluster, fault, (await cluster.followers())[turn % 2])
            leader = await cluster.leader()
            await hurt_two(load, cluster, fault, [leader, (await cluster.followers())[0]])
            await cluster.leader()


async def test_a_renewal_detects_a_frozen_member_in_time(way: str, cluster: Cluster) -> None:
    """A lease of four seconds is renewed after a third of that, with time left for other members."""
    await cluster.serves()
    member = (await cluster.followers())[0]
    for _ in range(5):
        async with going(way, cluster.address(cluster.members.index(member))) as transport:
            if await _notices(transport, cluster, member):
                return
    raise AssertionError("no renewal went to the frozen member")


async def _notices(transport: Transport, cluster: Cluster, member: Member) -> bool:
    """Freeze a member; return whether a renewal notices. On a busy machine it may have gone to another one before."""
    clock = SystemClock()
    lease = await transport.grant(60)
    assert await transport.keep_alive(lease) == 60
    async with frozen(member):
        asked_at = clock.monotonic()
        try:
            await transport.keep_alive(lease)
        except UnavailableError:
            assert clock.monotonic() - asked_at < CALL_S  # another call would take that long
            assert await transport.keep_alive(lease) == 60
            return True
    await cluster.serves()
    return False
