"""Fixtures: an empty transport of each kind. Keys are fixed, so a real etcd is emptied before each test."""

from collections.abc import AsyncIterator

import pytest

from machinery.clock import SystemClock
from store import keys
from store.etcd.connect import connect
from store.etcd.member.embedded import EmbeddedEtcd
from store.memory import MemoryTransport
from store.port import MAX_OPERATIONS, Delete, Transport
from tests.support.etcd import running_etcd


@pytest.fixture(scope="session")
async def manifests_etcd(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EmbeddedEtcd]:
    async with running_etcd(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd


@pytest.fixture
def memory() -> MemoryTransport:
    return MemoryTransport(SystemClock())


@pytest.fixture(params=["memory", pytest.param("etcd", marks=pytest.mark.etcd)])
async def transport(
    request: pytest.FixtureRequest, manifests_etcd: EmbeddedEtcd
) -> AsyncIterator[Transport]:
    made: Transport
    if request.param == "memory":
        made = MemoryTransport(SystemClock())
    else:
        made = connect(manifests_etcd.address)
        await sweep(made)
    yield made
    await made.close()


async def sweep(transport: Transport) -> None:
    """Delete every key below the root."""
    found = [item.key for item in (await transport.list(f"{keys.ROOT}/")).items]
    for start in range(0, len(found), MAX_OPERATIONS):
        batch = found[start : start + MAX_OPERATIONS]
        await transport.commit([], [Delete(key=key) for key in batch])
