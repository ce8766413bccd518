"""aetcd: grpc.aio; lists in one request, for it knows no pages."""

from typing import Any

from bench.store.client import Decode, Told, decoder, prefix_end, vendor

aetcd = vendor("aetcd")


class Aetcd:
    """aetcd's Client."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def put(self, key: str, value: bytes) -> None:
        await self._client.put(key.encode(), value)

    async def get(self, key: str) -> bytes:
        return bytes((await self._client.get(key.encode())).value)

    async def list(self, prefix: str) -> Decode:
        key = prefix.encode()
        answer = await self._client.get_range(key, prefix_end(key))
        found = [(kv.key, kv.value, kv.mod_revision) for kv in answer]
        return decoder(value for _, value, _ in found)

    async def watch(self, prefix: str, opened: Told, seen: Told) -> None:
        watch = await self._client.watch_prefix(prefix.encode())
        opened()
        try:
            async for event in watch:
                _ = event.kv.key, event.kv.value
                seen()
        finally:
            await watch.cancel()

    inform = watch

    async def grant(self, ttl_s: int) -> int:
        return int((await self._client.lease(ttl_s)).id)

    async def keep_alive(self, lease: int) -> int:
        return int((await self._client.refresh_lease(lease)).TTL)

    async def revoke(self, lease: int) -> None:
        await self._client.revoke_lease(lease)

    async def close(self) -> None:
        await self._client.close()


async def connect(url: str, _: str) -> Aetcd:
    host, _, port = url.removeprefix("http://").partition(":")
    options = {"grpc.max_receive_message_length": -1}
    client = aetcd.Client(host=host, port=int(port), options=options)
    await client.connect()
    return Aetcd(client)
