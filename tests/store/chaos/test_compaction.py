"""The history is compacted during watches, or a storm of events arrives at once."""

import random

import pytest

from machinery.clock import SystemClock
from store.port import Delete, Operation, Put
from tests.support import gateway
from tests.support.chaos_informers import Crowd, crowd, stored
from tests.support.chaos_transports import going
from tests.support.store_tcp_etcd import TcpEtcd

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(180)]

_KEYS = 150
_ROUNDS = 40


def some_operations(dice: random.Random, corner: str) -> list[Operation]:
    """Return a few writes and deletes of different keys."""
    keys = [f"{corner}{n:03}" for n in dice.sample(range(_KEYS), k=5)]
    return [
        Delete(key=key) if dice.random() < 0.4 else Put(key=key, value=f"{dice.random()}".encode())
        for key in keys
    ]


async def stir(tcp: TcpEtcd, crowd: Crowd, way: str, corner: str) -> None:
    """Write, delete, compact to the newest revision and cut connections, all at random."""
    dice = random.Random(corner)
    async with going(way, tcp.address) as writer:
        revision = 0
        for turn in range(_ROUNDS):
            if turn % 2:
                dice.choice(crowd.proxies).cut_all()
            for _ in range(dice.randrange(1, 8)):
                revision = await writer.commit([], some_operations(dice, corner))
            if turn % 3:
                await gateway.compact(tcp.url, revision)
            await SystemClock().sleep(dice.uniform(0, 0.1))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "times", [pytest.param(1, marks=pytest.mark.ci), pytest.param(50, marks=pytest.mark.soak)]
)
async def test_compaction_during_every_watch_loses_nothing(
    way: str, times: int, tcp: TcpEtcd, corner: str
) -> None:
    async with crowd(way, tcp.url, corner) as watching, going(way, tcp.address) as direct:
        lists_before = watching.lists
        for _ in range(times):
            await stir(tcp, watching, way, corner)
            assert watching.lists > lists_before, "nobody was ever compacted away"
            end = await direct.commit([], [Put(key=f"{corner}end", value=b"")])
            items, _ = await stored(direct, corner)
            await watching.equals(items, end, limit_s=60)


async def test_an_event_storm_reaches_every_informer(way: str, tcp: TcpEtcd, corner: str) -> None:
    """Make 10,000 changes in about a second; the last one of each key must remain."""
    async with crowd(way, tcp.url, corner) as watching, going(way, tcp.address) as writer:
        end = 0
        for turn in range(100):
            names = (f"{corner}{(turn * 37 + n) % 3000:04}" for n in range(100))
            value = f"turn {turn}".encode()
            end = await writer.commit([], [Put(key=name, value=value) for name in names])
        items, _ = await stored(writer, corner)
        await watching.equals(items, end, limit_s=60)
