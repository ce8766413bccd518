"""etcd3-py's AioClient as published, but for one name that aiohttp >= 3.10 broke its streams with."""

from typing import Any

from bench.store.client import Decode, Told, decoder, vendor

aio_client, aiohttp_client = vendor("etcd3.aio_client"), vendor("aiohttp.client")


class Etcd3Py:
    """etcd3-py's client."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def put(self, key: str, value: bytes) -> None:
        await self._client.put(key, value)

    async def get(self, key: str) -> bytes:
        return bytes((await self._client.range(key)).kvs[0].value)

    async def list(self, prefix: str) -> Decode:
        answer = await self._client.range(prefix, prefix=True)
        found = [(kv.key, kv.value, kv.mod_revision) for kv in answer.kvs]
        return decoder(value for _, value, _ in found)

    async def watch(self, prefix: str, opened: Told, seen: Told) -> None:
        async with self._client.watch_create(prefix, prefix=True) as watch:
            async for answer in watch:
                if answer.created:
                    opened()
                for _ in answer.events or ():
                    seen()

    inform = watch

    async def grant(self, ttl_s: int) -> int:
        return int((await self._client.lease_grant(ttl_s)).ID)

    async def keep_alive(self, lease: int) -> int:
        raise NotImplementedError("etcd3-py cannot renew a lease: no lease figures")

    async def revoke(self, lease: int) -> None:
        await self._client.lease_revoke(lease)

    async def close(self) -> None:
        await self._client.close()


async def connect(url: str, _: str) -> Etcd3Py:
    aio_client._RequestContextManager = aiohttp_client._BaseRequestContextManager  # noqa: SLF001 - see above
    host, _, port = url.removeprefix("http://").partition(":")
    return Etcd3Py(aio_client.AioClient(host, int(port)))
