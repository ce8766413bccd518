"""An informer of texts that runs during a block, and writes to the store below it."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from machinery.clock import Clock, SystemClock
from store.codec import NewerDocumentError, UndecodableError
from store.etcd.http.json_api import JsonGateway
from store.etcd.member.embedded import EmbeddedEtcd
from store.informer import Informer
from store.memory import MemoryTransport
from store.metrics import MeasuredTransport
from store.namespace import NamespacedTransport
from store.port import Delete, KeyValue, Put, Transport
from tests.support.store_metrics import gauges


def text_of(item: KeyValue) -> str:
    if item.value == b"newer":
        raise NewerDocumentError(f"{item.key} is newer")
    if item.value == b"bad":
        raise UndecodableError(f"{item.key} is bad")
    return item.value.decode()


async def put(transport: Transport, key: str, value: str) -> int:
    return await transport.commit([], [Put(key=key, value=value.encode())])


async def delete(transport: Transport, key: str) -> int:
    return await transport.commit([], [Delete(key=key)])


@asynccontextmanager
async def running(
    transport: Transport,
    prefix: str,
    clock: Clock | None = None,
    *,
    jitter: Callable[[], float] = random.random,
) -> AsyncIterator[Informer[str]]:
    informer = Informer(transport, prefix, text_of, clock or SystemClock(), jitter=jitter)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(informer.run())
        try:
            yield informer
        finally:
            task.cancel()


async def compact(transport: Transport, etcd: EmbeddedEtcd) -> None:
    """Compact the history up to the current revision."""
    bare = transport
    while isinstance(bare, NamespacedTransport | MeasuredTransport):
        bare = bare.inner
    if isinstance(bare, MemoryTransport):
        bare.compact()
        return
    route = JsonGateway(etcd.address)
    revision = (await transport.status()).revision
    await route.call("/kv/compaction", {"revision": str(revision), "physical": True})
    await route.close()


async def watchers(url: str) -> int:
    """Return how many watches etcd counts."""
    return int((await gauges(url))["etcd_debugging_mvcc_watcher_total"])
