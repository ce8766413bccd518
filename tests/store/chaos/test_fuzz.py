"""Many seeds of delays, cuts and stalls between a client and etcd; see `fuzz.Seed`.

A seed that fails says so; `python -m tests.support.chaos_fuzz WAY SEED` runs it again.
"""

import random
from collections.abc import AsyncIterator

import pytest

from tests.support.chaos_fuzz import FLAGS, run_seeds
from tests.support.chaos_transports import DEFAULT, WAYS
from tests.support.sampling import samples
from tests.support.store_tcp_etcd import TcpEtcd

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(480)]

_SEEDS, _SEEDS_OF_OTHER_WAYS = samples(150, quick=40), samples(40, quick=30)


@pytest.fixture(scope="module")
async def tcp(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TcpEtcd]:
    async with TcpEtcd(tmp_path_factory.mktemp("fuzz"), *FLAGS) as etcd:
        yield etcd


@pytest.mark.ci
@pytest.mark.parametrize("way", WAYS)
async def test_network_faults_lose_nothing(way: str, tcp: TcpEtcd) -> None:
    count = _SEEDS if way == DEFAULT else _SEEDS_OF_OTHER_WAYS
    counter = await run_seeds(range(count), way, tcp.url)
    # A run without faults proves nothing.
    assert counter["ambiguous"] > 0
    assert counter["unavailable"] > count / 4
    assert counter["connections"] > count


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.soak
@pytest.mark.timeout(7200)
async def test_network_faults_lose_nothing_with_fresh_seeds(way: str, tcp: TcpEtcd) -> None:
    first = random.randrange(10_000, 1_000_000_000)
    print(f"seeds from {first}")
    await run_seeds(range(first, first + 10_000), way, tcp.url)
