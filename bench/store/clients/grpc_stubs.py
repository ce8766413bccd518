"""grpc.aio with generated stubs (those that aetcd carries): the least a gRPC client can cost.

Keepalives share one stream, as etcd's own client does it.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

from bench.store.client import Decode, Told, decoder, prefix_end, vendor

grpc, rpc = vendor("grpc"), vendor("aetcd.rpc")
PAGE = 5_000


class Stubs:
    """One channel, and one stream of keepalives."""

    def __init__(self, url: str) -> None:
        target = url.removeprefix("http://")
        self._channel = grpc.aio.insecure_channel(
            target, options=[("grpc.max_receive_message_length", -1)]
        )
        self._kv, self._leases = rpc.KVStub(self._channel), rpc.LeaseStub(self._channel)
        self._watches = rpc.WatchStub(self._channel)
        self._renewals: Any = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[int, list[asyncio.Future[int]]] = defaultdict(list)

    async def put(self, key: str, value: bytes) -> None:
        await self._kv.Put(rpc.PutRequest(key=key.encode(), value=value))

    async def get(self, key: str) -> bytes:
        answer = await self._kv.Range(rpc.RangeRequest(key=key.encode()))
        return bytes(answer.kvs[0].value)

    async def list(self, prefix: str) -> Decode:
        start, end, revision = prefix.encode(), prefix_end(prefix.encode()), 0
        found: list[tuple[bytes, bytes, int]] = []
        while True:
            request = rpc.RangeRequest(key=start, range_end=end, limit=PAGE, revision=revision)
            answer = await self._kv.Range(request)
            revision = answer.header.revision
            found += [(kv.key, kv.value, kv.mod_revision) for kv in answer.kvs]
            if not answer.more:
                return decoder(value for _, value, _ in found)
            start = found[-1][0] + b"\0"

    async def watch(self, prefix: str, opened: Told, seen: Told) -> None:
        key = prefix.encode()
        create = rpc.WatchCreateRequest(key=key, range_end=prefix_end(key))
        call = self._watches.Watch()
        try:
            await call.write(rpc.WatchRequest(create_request=create))
            async for answer in call:
                if answer.created:
                    opened()
                for event in answer.events:
                    _ = event.kv.key, event.kv.value
                    seen()
        finally:
            call.cancel()

    inform = watch

    async def grant(self, ttl_s: int) -> int:
        return int((await self._leases.LeaseGrant(rpc.LeaseGrantRequest(TTL=ttl_s))).ID)

    async def keep_alive(self, lease: int) -> int:
        if self._reader is None:
            self._renewals = asyncio.Queue()
            call = self._leases.LeaseKeepAlive(self._requests())
            self._reader = asyncio.get_running_loop().create_task(self._read(call))
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[lease].append(answer)
        self._renewals.put_nowait(rpc.LeaseKeepAliveRequest(ID=lease))
        return await answer

    async def _requests(self) -> AsyncIterator[Any]:
        while True:
            yield await self._renewals.get()

    async def _read(self, call: Any) -> None:
        async for answer in call:
            for waiting in self._waiting.pop(answer.ID, ()):
                waiting.set_result(int(answer.TTL))

    async def revoke(self, lease: int) -> None:
        await self._leases.LeaseRevoke(rpc.LeaseRevokeRequest(ID=lease))

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        await self._channel.close()


async def connect(url: str, _: str) -> Stubs:
    return Stubs(url)
