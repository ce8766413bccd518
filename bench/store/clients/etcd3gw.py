"""etcd3gw: requests over the JSON gateway, in 64 threads, for it knows no event loop."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.store.client import Decode, Told, decoder, prefix_end, vendor

etcd3gw, watching, leases = vendor("etcd3gw"), vendor("etcd3gw.watch"), vendor("etcd3gw.lease")
adapters, requests = vendor("requests.adapters"), vendor("requests")
PAGE, THREADS = 5_000, 64


class Etcd3gw:
    """etcd3gw's client; every call in a thread."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def put(self, key: str, value: bytes) -> None:
        await asyncio.to_thread(self._client.put, key, value)

    async def get(self, key: str) -> bytes:
        return bytes((await asyncio.to_thread(self._client.get, key))[0])

    async def list(self, prefix: str) -> Decode:
        return await asyncio.to_thread(self._list, prefix)

    def _list(self, prefix: str) -> Decode:
        start, end = prefix.encode(), prefix_end(prefix.encode())
        found: list[tuple[bytes, bytes, int]] = []
        while True:
            page = self._client.get(start, metadata=True, range_end=end, limit=PAGE)
            found += [(kv["key"], value, int(kv["mod_revision"])) for value, kv in page]
            if len(page) < PAGE:
                return decoder(value for _, value, _ in found)
            start = found[-1][0] + b"\0"

    async def watch(self, prefix: str, opened: Told, seen: Told) -> None:
        loop, key = asyncio.get_running_loop(), prefix.encode()

        def told(_: object) -> None:
            loop.call_soon_threadsafe(seen)

        def start() -> Any:
            return watching.Watcher(self._client, key, told, range_end=prefix_end(key))

        watcher = await asyncio.to_thread(start)
        opened()
        try:
            await loop.create_future()
        finally:
            watcher.stop()

    inform = watch

    async def grant(self, ttl_s: int) -> int:
        return int((await asyncio.to_thread(self._client.lease, ttl_s)).id)

    async def keep_alive(self, lease: int) -> int:
        return int(await asyncio.to_thread(leases.Lease(lease, self._client).refresh))

    async def revoke(self, lease: int) -> None:
        await asyncio.to_thread(leases.Lease(lease, self._client).revoke)

    async def close(self) -> None:
        self._client.session.close()


async def connect(url: str, _: str) -> Etcd3gw:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
    host, _, port = url.removeprefix("http://").partition(":")
    session = requests.Session()
    session.trust_env = False
    session.mount("http://", adapters.HTTPAdapter(pool_maxsize=THREADS))
    return Etcd3gw(etcd3gw.Etcd3Client(host=host, port=int(port), session=session))
