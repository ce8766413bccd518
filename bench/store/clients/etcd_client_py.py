"""etcd-client-py: Rust under Python; values only, no revisions, no pages, answers up to 4 MiB."""

import asyncio
from typing import Any

from bench.store.client import Decode, Told, decoder, vendor

etcd_client = vendor("etcd_client")


class EtcdClientPy:
    """etcd-client-py's communicator."""

    def __init__(self, connection: Any, communicator: Any) -> None:
        self._connection = connection
        self._client = communicator

    async def put(self, key: str, value: bytes) -> None:
        await self._client.put(key.encode(), value)

    async def get(self, key: str) -> bytes:
        return bytes(await self._client.get(key.encode()))

    async def list(self, prefix: str) -> Decode:
        pairs = await self._client.get_prefix(prefix.encode())
        found = [(bytes(key), bytes(value)) for key, value in pairs]
        return decoder(value for _, value in found)

    async def watch(self, prefix: str, opened: Told, seen: Told) -> None:
        ready = etcd_client.CondVar()

        async def say() -> None:
            await ready.wait()
            opened()

        async with asyncio.TaskGroup() as group:
            group.create_task(say())
            await asyncio.sleep(0)  # who does not wait yet is not told
            async for event in self._client.watch_prefix(prefix.encode(), ready_event=ready):
                _ = bytes(event.key), bytes(event.value)
                seen()

    inform = watch

    async def grant(self, ttl_s: int) -> int:
        raise NotImplementedError("etcd-client-py has no call to renew one lease: no lease figures")

    async def keep_alive(self, lease: int) -> int:
        raise NotImplementedError("etcd-client-py has no call to renew one lease: no lease figures")

    async def revoke(self, lease: int) -> None:
        raise NotImplementedError("etcd-client-py has no call to renew one lease: no lease figures")

    async def close(self) -> None:
        await self._connection.__aexit__(None, None, None)


async def connect(url: str, _: str) -> EtcdClientPy:
    connection = etcd_client.Client([url]).connect()
    return EtcdClientPy(connection, await connection.__aenter__())
