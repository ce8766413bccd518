"""Defects of etcd3-py's constructor and streams, for which `store.etcd.http.json_api` replaces them.

If one of these fails after an upgrade, etcd3-py has mended it; read docs/adr/0002-etcd-clients.md.
"""

import asyncio
import gc
import warnings
from collections.abc import AsyncIterator, Iterator

import pytest
from etcd3 import AioClient

from store.etcd.http.json_api import _Etcd3Client
from store.etcd.http.transport import HttpTransport
from store.port import Put
from tests.support.ports import free_port
from tests.support.store_tcp_etcd import TcpEtcd

pytestmark = pytest.mark.etcd


@pytest.fixture(scope="module")
async def tcp(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TcpEtcd]:
    async with TcpEtcd(tmp_path_factory.mktemp("streams")) as etcd:
        yield etcd


@pytest.fixture(autouse=True)
def littering() -> Iterator[None]:
    """Tolerate connections that etcd3-py leaves open."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
        gc.collect()


async def test_the_library_constructor_fails_while_etcd_is_down() -> None:
    with pytest.raises(AttributeError, match="server_version_sem"):
        AioClient("127.0.0.1", free_port())


async def test_our_constructor_does_no_io(tcp: TcpEtcd) -> None:
    route = _Etcd3Client("http://127.0.0.1:1", None)  # type: ignore[arg-type]
    assert route.baseurl == "http://127.0.0.1:1"


async def test_the_library_watch_loses_events(tcp: TcpEtcd) -> None:
    """It raises TypeError on aiohttp >= 3.10; with older versions it loses events of a burst."""
    ours = HttpTransport(tcp.address)
    start = await ours.commit([], [Put(key="/burst/start", value=b"")])
    async with asyncio.TaskGroup() as group:
        for n in range(200):
            group.create_task(ours.commit([], [Put(key=f"/burst/{n}", value=b"v")]))
    seen = 0
    async for batch in ours.watch("/burst/", after_revision=start):
        seen += len(batch.changes)
        if seen == 200:
            break
    client = AioClient("127.0.0.1", tcp.port)
    theirs = await delivered(client, start)
    await client.close()
    await ours.close()
    assert theirs < seen == 200


async def delivered(client: AioClient, start: int) -> int:
    """Return the number of events that etcd3-py's watch delivers before it breaks or falls silent."""
    count = 0
    try:
        async with (
            asyncio.timeout(2),
            client.watch_create("/burst/", prefix=True, start_revision=start + 1) as watch,
        ):
            async for answer in watch:
                count += len(answer.events or ())
    except (TypeError, TimeoutError):
        pass
    return count
