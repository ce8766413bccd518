"""Many informers of one prefix, as a fleet's processes have them, and a check of their caches."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

from machinery.clock import SystemClock
from store.errors import UnavailableError
from store.etcd.address import EtcdAddress
from store.informer import Informer
from store.port import KeyValue, Transport
from tests.support.chaos_transports import going
from tests.support.tcp_proxy import TcpProxy, proxied

IDLE_S = 2.0


class Listed:
    """A transport that counts its list requests."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.lists = 0

    def __getattr__(self, name: str) -> Any:
        self.lists += name in ("list", "pages")
        return getattr(self._inner, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """Informers, and the proxies between them and the store."""

    informers: Sequence[Informer[KeyValue]]
    proxies: Sequence[TcpProxy]
    tallies: Sequence[Listed]

    @property
    def lists(self) -> int:
        return sum(tally.lists for tally in self.tallies)

    async def equals(self, store: Mapping[str, KeyValue], revision: int, *, limit_s: float) -> None:
        """Wait until every cache has reached the revision, and compare it with the store."""
        for number, informer in enumerate(self.informers):
            try:
                async with asyncio.timeout(limit_s):
                    await informer.reached(revision)
            except TimeoutError:
                raise AssertionError(
                    f"informer {number} is at {informer.revision}, not at {revision}"
                ) from None
            assert dict(informer.items) == store, f"informer {number} differs from the store"
            assert {k: informer.version(k) for k in store} == {
                k: item.mod_revision for k, item in store.items()
            }, f"informer {number} has other versions"


@asynccontextmanager
async def crowd(way: str, url: str, prefix: str, *, size: int = 20) -> AsyncIterator[Crowd]:
    """Run informers, five per transport; each transport has its own proxy."""
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(proxied(url)) for _ in range(-(-size // 5))]
        tallies: list[Listed] = []
        for proxy in proxies:
            address = EtcdAddress(endpoints=(proxy.url,))
            transport = await stack.enter_async_context(going(way, address, idle_s=IDLE_S))
            tallies.append(Listed(transport))
        informers = [
            Informer(
                cast("Transport", tallies[n % len(tallies)]),
                prefix,
                lambda item: item,
                SystemClock(),
            )
            for n in range(size)
        ]
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(informer.run()) for informer in informers]
            async with asyncio.timeout(60):
                for informer in informers:
                    await informer.wait_synced()
            yield Crowd(informers=informers, proxies=proxies, tallies=tallies)
            for task in running:
                task.cancel()


async def stored(transport: Transport, prefix: str) -> tuple[dict[str, KeyValue], int]:
    """Return the keys below the prefix, and the revision of their last change."""
    listing = await transport.list(prefix)
    newest = max((item.mod_revision for item in listing.items), default=0)
    return {item.key: item for item in listing.items}, newest


async def retried(transport: Transport, prefix: str) -> tuple[dict[str, KeyValue], int]:
    """Do the same, and retry until it works."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await stored(transport, prefix)
            except UnavailableError:
                await SystemClock().sleep(0.1)
