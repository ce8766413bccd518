"""Our own client: the transport that the option names, with our informer."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Literal

from bench.store.client import Decode, Told
from machinery.clock import SystemClock
from schemas.deployment import ModelDeployment
from store import codec, objects
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect as connect_to
from store.informer import Informer
from store.port import KeyValue, Put, Transport


class Ours:
    """`store.port.Transport` as the benchmark wants it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def put(self, key: str, value: bytes) -> None:
        await self._transport.commit([], [Put(key=key, value=value)])

    async def get(self, key: str) -> bytes:
        item = await self._transport.get(key)
        assert item is not None
        return item.value

    async def list(self, prefix: str) -> Decode:
        listing = await self._transport.list(prefix)
        return lambda: objects.decode_all(ModelDeployment, listing.items)

    async def objects(self, prefix: str) -> int:
        """List and decode as our processes do when they start; return the number of objects."""
        informer = Informer(self._transport, prefix, _decode, SystemClock())
        await informer.list_once()
        return len(informer.items)

    async def watch(self, prefix: str, opened: Told, seen: Told) -> None:
        revision = (await self._transport.status()).revision
        async with aclosing(self._transport.watch(prefix, after_revision=revision)) as batches:
            await anext(batches)
            opened()
            async for batch in batches:
                for _ in batch.changes:
                    seen()

    async def inform(self, prefix: str, opened: Told, seen: Told) -> None:
        informer = Informer(self._transport, prefix, _decode, SystemClock())
        informer.on_change(_ignoring_key(seen))
        async with asyncio.TaskGroup() as group:
            group.create_task(informer.run())
            await informer.wait_synced()
            opened()

    async def grant(self, ttl_s: int) -> int:
        return await self._transport.grant(ttl_s)

    async def keep_alive(self, lease: int) -> int:
        return await self._transport.keep_alive(lease)

    async def revoke(self, lease: int) -> None:
        await self._transport.revoke(lease)

    async def close(self) -> None:
        await self._transport.close()


def _decode(item: KeyValue) -> ModelDeployment:
    return codec.decode_object(ModelDeployment, item)


def _ignoring_key(seen: Told) -> Callable[[str], None]:
    def handler(_: str) -> None:
        seen()

    return handler


async def connect(url: str, option: str) -> Ours:
    way: Literal["grpc", "http"] = "http" if option == "http" else "grpc"
    return Ours(connect_to(EtcdAddress(endpoints=(url,), transport=way)))
