"""Fixtures: each test of the suite runs with every transport."""

from collections.abc import AsyncIterator

import pytest

from tests.support.chaos_load import PROGRESS
from tests.support.chaos_transports import DEFAULT, WAYS
from tests.support.store_tcp_etcd import TcpEtcd


@pytest.fixture(scope="module")
async def tcp(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TcpEtcd]:
    """An etcd on a port that the tests of a file share; it reports progress often."""
    async with TcpEtcd(tmp_path_factory.mktemp("tcp"), PROGRESS) as etcd:
        yield etcd


# Minutes of faults with each transport: always with the default one, with the others only in the full run.
@pytest.fixture(
    params=[pytest.param(way, marks=[] if way == DEFAULT else pytest.mark.soak) for way in WAYS]
)
def way(request: pytest.FixtureRequest) -> str:
    name = request.param
    assert isinstance(name, str)
    return name
