"""A client that returns after a very long time gets every event, once and in order."""

import asyncio
from contextlib import aclosing

import pytest

from store.errors import UnavailableError
from store.etcd.address import EtcdAddress
from store.port import KeyChange
from tests.support import gateway, puts
from tests.support.chaos_informers import IDLE_S
from tests.support.chaos_transports import DEFAULT, going
from tests.support.store_tcp_etcd import TcpEtcd
from tests.support.tcp_proxy import TcpProxy, proxied

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(180)]

# etcd catches up a thousand revisions at a time: these are thirty rounds, and a hundred.
_BEHIND = (30_000, pytest.param(100_000, marks=pytest.mark.soak))


@pytest.fixture(scope="module", params=_BEHIND)
async def long_history(tcp: TcpEtcd, request: pytest.FixtureRequest) -> tuple[str, int, int]:
    """A prefix, the number of revisions below it, and the last one of them."""
    revisions: int = request.param
    prefix = f"/long/{revisions}/"
    await puts.fill(tcp.url, revisions=revisions, prefix=prefix)
    return prefix, revisions, await gateway.revision(tcp.url)


async def catch_up(
    way: str, proxy: TcpProxy, prefix: str, after: int, wanted: int
) -> list[KeyChange]:
    """Watch until so many events have arrived; the connection is cut meanwhile."""
    async with going(way, EtcdAddress(endpoints=(proxy.url,)), idle_s=IDLE_S) as transport:
        changes: list[KeyChange] = []
        cuts = [wanted // 3, wanted // 2]
        while len(changes) < wanted:
            try:
                async with aclosing(transport.watch(prefix, after_revision=after)) as watch:
                    async for batch in watch:
                        changes.extend(batch.changes)
                        after = max(after, batch.revision)
                        if cuts and len(changes) >= cuts[0]:
                            del cuts[0]
                            proxy.cut_all()
                        if len(changes) >= wanted:
                            break
            except UnavailableError:
                continue
    return changes


@pytest.mark.ci
async def test_a_watcher_far_behind_catches_up_without_loss(
    way: str, tcp: TcpEtcd, long_history: tuple[str, int, int]
) -> None:
    prefix, revisions, end = long_history
    behind = revisions if way == DEFAULT else revisions // 5
    async with proxied(tcp.url) as proxy, asyncio.timeout(120):
        changes = await catch_up(way, proxy, prefix, end - behind, behind)
        assert proxy.accepted > 2, "nothing was cut"
    assert [c.mod_revision for c in changes] == list(range(end - behind + 1, end + 1))
    last: dict[str, int] = {}
    for change in changes:
        assert change.now is not None
        value = int(change.now.value)
        assert last.get(change.key, value - 1) == value - 1
        last[change.key] = value
