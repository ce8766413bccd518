"""etcd3aio: grpc.aio with retries; its channel takes answers of up to 4 MiB."""

from typing import Any

from bench.store.client import Decode, Told, decoder, prefix_end, vendor

etcd3aio = vendor("etcd3aio")
PAGE = 4_000


class Etcd3aio:
    """etcd3aio's client."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def put(self, key: str, value: bytes) -> None:
        await self._client.kv.put(key, value)

    async def get(self, key: str) -> bytes:
        return bytes((await self._client.kv.get(key)).kvs[0].value)

    async def list(self, prefix: str) -> Decode:
        start, end, revision = prefix.encode(), prefix_end(prefix.encode()), 0
        found: list[tuple[bytes, bytes, int]] = []
        while True:
            answer = await self._client.kv.get(start, end, revision=revision, limit=PAGE)
            revision = answer.header.revision
            found += [(kv.key, kv.value, kv.mod_revision) for kv in answer.kvs]
            if not answer.more:
                return decoder(value for _, value, _ in found)
            start = found[-1][0] + b"\0"

    async def watch(self, prefix: str, opened: Told, seen: Told) -> None:
        key = prefix.encode()
        async for answer in self._client.watch.watch(key, prefix_end(key)):
            if answer.created:
                opened()
            for event in answer.events:
                _ = event.kv.key, event.kv.value
                seen()

    inform = watch

    async def grant(self, ttl_s: int) -> int:
        return int((await self._client.lease.grant(ttl_s)).ID)

    async def keep_alive(self, lease: int) -> int:
        async for answer in self._client.lease.keep_alive(lease):
            return int(answer.TTL)
        return 0

    async def revoke(self, lease: int) -> None:
        await self._client.lease.revoke(lease)

    async def close(self) -> None:
        await self._client.close()


async def connect(url: str, _: str) -> Etcd3aio:
    client = etcd3aio.Etcd3Client([url.removeprefix("http://")])
    await client.connect()
    return Etcd3aio(client)
