"""The calls of clients of a restarted etcd are linearizable."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from machinery.clock import SystemClock
from store.etcd.member.embedded import EmbeddedEtcd
from store.port import Transport
from tests.support.chaos_history import Recording
from tests.support.chaos_transports import go
from tests.support.cluster import Cluster, killing_signal, running_cluster
from tests.support.waiting import until

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(180)]

CLIENTS, REGISTERS, CALLS = 8, 3, 150


@asynccontextmanager
async def recorded(transports: list[Transport], corner: str) -> AsyncIterator[Recording]:
    """Record while the block runs, and check the history at its end."""
    recording = Recording(corner, REGISTERS, SystemClock())
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(recording.run(transports, CLIENTS))
            yield recording
            recording.is_over = True
        recording.judge()
    finally:
        for transport in transports:
            await transport.close()


async def more_calls(recording: Recording) -> None:
    wanted = recording.calls + CALLS
    await until(lambda: recording.calls >= wanted, limit_s=60, what=f"{CALLS} more calls")


async def kill(etcd: EmbeddedEtcd) -> None:
    """Kill the member in the middle of its work, and start it again."""
    assert etcd.supervisor.pid
    os.kill(etcd.supervisor.pid, killing_signal())
    await until(lambda: not etcd.supervisor.running)
    await etcd.start()


async def rounds(recording: Recording, harm: Callable[[], Awaitable[None]], times: int) -> None:
    for _ in range(times):
        await more_calls(recording)
        await harm()
    await more_calls(recording)


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    flags = ("--heartbeat-interval=50", "--election-timeout=500")
    async with running_cluster(tmp_path_factory.mktemp("history"), *flags) as made:
        yield made


async def replace_leader(cluster: Cluster) -> None:
    """Kill the leader, let another member lead, and bring the first one back."""
    leader = await cluster.leader()
    await leader.kill()
    await cluster.leader()
    await leader.start()
    await cluster.serves()


async def freeze_leader(cluster: Cluster) -> None:
    """Freeze the leader until another leads: it wakes up and believes that it still leads."""
    leader = await cluster.leader()
    leader.freeze()
    await cluster.leader()
    leader.thaw()
    await cluster.serves()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "times", [pytest.param(3, marks=pytest.mark.ci), pytest.param(100, marks=pytest.mark.soak)]
)
async def test_killing_a_member_keeps_history_linearizable(
    way: str, times: int, etcd: EmbeddedEtcd, corner: str
) -> None:
    async with recorded([go(way, etcd.address) for _ in range(2)], corner) as recording:
        await rounds(recording, lambda: kill(etcd), times)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("times", [2, pytest.param(50, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "harm", [pytest.param(replace_leader, marks=pytest.mark.ci), freeze_leader]
)
async def test_a_new_leader_keeps_history_linearizable(
    way: str, times: int, harm: Callable[[Cluster], Awaitable[None]], cluster: Cluster, corner: str
) -> None:
    await cluster.serves()
    transports = [go(way, cluster.address(n)) for n in range(3)]
    async with recorded(transports, corner) as recording:
        await rounds(recording, lambda: harm(cluster), times)
