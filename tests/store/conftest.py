"""Fixtures: a transport of each kind, and a prefix for each test."""

from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from machinery.clock import SystemClock
from store import namespace
from store.etcd.connect import connect
from store.etcd.member.embedded import EmbeddedEtcd
from store.memory import MemoryTransport
from store.metrics import MeasuredTransport, StoreMetrics
from store.port import Transport
from tests.support.etcd import running_etcd
from tests.support.store_faults import FaultyTransport
from tests.support.store_tcp_etcd import TcpEtcd

_corners = count(1)


@pytest.fixture(scope="session")
async def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EmbeddedEtcd]:
    async with running_etcd(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd


@pytest.fixture
async def etcd(tmp_path: Path) -> AsyncIterator[EmbeddedEtcd]:
    """An etcd of its own for the test, which may kill it."""
    async with running_etcd(tmp_path) as own:
        yield own


@pytest.fixture(
    params=[
        "memory",
        "namespace",
        "measured",
        pytest.param("grpc", marks=pytest.mark.etcd),
        pytest.param("http", marks=pytest.mark.etcd),
    ]
)
async def transport(
    request: pytest.FixtureRequest, shared_etcd: EmbeddedEtcd
) -> AsyncIterator[Transport]:
    made: Transport
    if request.param == "memory":
        made = MemoryTransport(SystemClock())
    elif request.param == "namespace":
        made = namespace.with_prefix(MemoryTransport(SystemClock()), "/a/fleet")
    elif request.param == "measured":
        clock = SystemClock()
        made = MeasuredTransport(MemoryTransport(clock), StoreMetrics(clock))
    else:
        made = connect(replace(shared_etcd.address, transport=request.param))
    yield made
    await made.close()


@pytest.fixture
def memory() -> MemoryTransport:
    return MemoryTransport(SystemClock())


@pytest.fixture
def faulty(memory: MemoryTransport) -> FaultyTransport:
    return FaultyTransport(memory)


@pytest.fixture(scope="module")
async def tcp(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TcpEtcd]:
    """An etcd on a port that the tests of a file share."""
    async with TcpEtcd(tmp_path_factory.mktemp("tcp")) as etcd:
        yield etcd


@pytest.fixture
def corner() -> str:
    """A prefix that no other test uses."""
    return f"/test/{next(_corners)}/"
