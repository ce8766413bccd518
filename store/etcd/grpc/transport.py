"""The gRPC adapter: the port's methods as calls of etcd's API, and lease renewals on one open stream."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import assert_never

from store import reads
from store.errors import (
    ConflictError,
    LeaseLostError,
    TooLargeError,
)
from store.etcd.adapter import IDLE_S, RENEW_S
from store.etcd.address import EtcdAddress
from store.etcd.authentication import Authentication
from store.etcd.grpc import wire
from store.etcd.grpc.channel import GrpcChannel, Stream
from store.etcd.grpc.proto import etcd_pb2 as pb
from store.etcd.grpc.watches import Watches
from store.keys import prefix_end
from store.port import (
    MAX_OPERATIONS,
    Delete,
    Guard,
    KeyValue,
    Listing,
    Operation,
    Put,
    ServerStatus,
    WatchBatch,
)

_RenewalStream = Stream[pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse]


class LeaseRenewals:
    """Renews leases one after another on one stream, at half the cost of a stream per renewal.

    After any error the stream is replaced.
    """

    def __init__(self, channel: GrpcChannel) -> None:
        self._channel = channel
        self._turn = asyncio.Lock()
        self._stream: _RenewalStream | None = None

    async def renew(self, lease: int) -> int:
        """Renew the lease; return its lifetime in seconds from the sending of this call, or 0 if it is gone.

        Raises:
            StoreError: unknown outcome; the lease may have been renewed.

        """
        async with self._turn:
            is_sound = False
            try:
                stream = await self._current()
                await stream.send(pb.LeaseKeepAliveRequest(id=lease), limit_s=RENEW_S)
                answer = await stream.receive(limit_s=RENEW_S)
                if answer.id != lease:
                    raise stream.failure("an answer for another lease")
                is_sound = True
            finally:
                if not is_sound:
                    self._drop()
        return answer.ttl

    async def _current(self) -> _RenewalStream:
        if self._stream is None:
            self._stream = await self._channel.open(wire.KEEP_ALIVE)
        return self._stream

    def _drop(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    async def close(self) -> None:
        async with self._turn:
            self._drop()


# For one page. A user at a terminal waits for two attempts of this.
_LIST_S = 5.0


class GrpcTransport:
    """`store.port.Transport` over gRPC; connects on first use."""

    def __init__(
        self,
        address: EtcdAddress,
        *,
        idle_s: float = IDLE_S,
        authentication: Authentication | None = None,
    ) -> None:
        self._channel = GrpcChannel(address, idle_s=idle_s, authentication=authentication)
        self._renewals = LeaseRenewals(self._channel)
        self._watches = Watches(self._channel)

    async def get(self, key: str) -> KeyValue | None:
        answer = await self._channel.read(wire.RANGE, pb.RangeRequest(key=wire.raw(key)))
        return wire.key_value(answer.kvs[0]) if answer.kvs else None

    async def list(self, prefix: str) -> Listing:
        return await reads.collect(lambda: self.pages(prefix))

    def pages(self, prefix: str) -> AsyncGenerator[Listing]:
        range_end = wire.raw(prefix_end(prefix))

        async def fetch(*, start: str, revision: int, limit: int) -> reads.Page:
            request = pb.RangeRequest(
                key=wire.raw(start), range_end=range_end, limit=limit, revision=revision
            )
            answer = await self._channel.read(wire.RANGE, request, limit_s=_LIST_S, tries=2)
            return reads.Page(
                items=tuple(map(wire.key_value, answer.kvs)),
                revision=answer.header.revision,
                store=str(answer.header.cluster_id),
                more=answer.more,
            )

        return reads.pages(prefix, fetch)

    async def commit(self, guards: Sequence[Guard], operations: Sequence[Operation]) -> int:
        if max(len(guards), len(operations)) > MAX_OPERATIONS:
            raise TooLargeError(
                f"a transaction takes {MAX_OPERATIONS} operations, not {len(operations)}"
            )
        if not guards and len(operations) == 1:
            operation = operations[0]
            match operation:
                case Put():
                    done = await self._channel.call(wire.PUT, wire.put(operation))
                case Delete():
                    done = await self._channel.call(wire.DELETE_RANGE, wire.delete(operation))
                case _:
                    assert_never(operation)
            return done.header.revision
        answer = await self._channel.call(wire.TXN, wire.transaction(guards, operations))
        if not answer.succeeded:
            raise ConflictError("the data has changed since it was read")
        return answer.header.revision

    def watch(self, prefix: str, *, after_revision: int) -> AsyncGenerator[WatchBatch]:
        return self._watches.watch(prefix, after_revision)

    async def grant(self, ttl_s: int) -> int:
        return (await self._channel.call(wire.GRANT, pb.LeaseGrantRequest(ttl=ttl_s))).id

    async def keep_alive(self, lease: int) -> int:
        return await self._renewals.renew(lease)

    async def revoke(self, lease: int) -> None:
        try:
            await self._channel.call(wire.REVOKE, pb.LeaseRevokeRequest(id=lease))
        except LeaseLostError:
            return

    async def status(self) -> ServerStatus:
        answer = await self._channel.read(wire.STATUS, pb.Empty())
        return ServerStatus(version=answer.version, revision=answer.header.revision)

    async def close(self) -> None:
        self._watches.close()
        await self._renewals.close()
        await self._channel.close()
