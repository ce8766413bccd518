"""A part of a shared etcd: every key is below a prefix that callers do not see.

As etcd's client/v3/namespace. Leases and revisions belong to the whole store. Isolation comes from etcd's permissions,
a role per prefix (`etcdctl role grant-permission --prefix`), not from this module.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from typing_extensions import override

from store.forwarding import ForwardedCalls
from store.port import (
    Guard,
    KeyChange,
    KeyValue,
    Listing,
    Operation,
    Transport,
    WatchBatch,
)


def with_prefix(inner: Transport, prefix: str) -> Transport:
    """Return a transport for the keys below the prefix; the same transport if the prefix is empty.

    Raises:
        ValueError: the prefix is not of the form `/a/b`.

    """
    return NamespacedTransport(inner, prefix) if prefix else inner


class NamespacedTransport(ForwardedCalls):
    """`store.port.Transport` for the keys of another transport below a prefix; closing it closes the other.

    Keys begin with `/`, and the prefix does not end with one, so that `/blue` never reads `/blue-2`.
    """

    def __init__(self, inner: Transport, prefix: str) -> None:
        if not prefix.startswith("/") or prefix.endswith("/"):
            raise ValueError(f"a prefix of keys looks like /name, not like {prefix!r}")
        self.inner = inner
        self._prefix = prefix

    @override
    async def get(self, key: str) -> KeyValue | None:
        item = await self.inner.get(self._outside(key))
        return None if item is None else self._inside(item)

    @override
    async def pages(self, prefix: str) -> AsyncGenerator[Listing]:
        async with aclosing(self.inner.pages(self._outside(prefix))) as pages:
            async for page in pages:
                yield page._replace(items=tuple(map(self._inside, page.items)))

    @override
    async def commit(self, guards: Sequence[Guard], operations: Sequence[Operation]) -> int:
        return await self.inner.commit(
            [replace(guard, key=self._outside(guard.key)) for guard in guards],
            [replace(operation, key=self._outside(operation.key)) for operation in operations],
        )

    @override
    async def watch(self, prefix: str, *, after_revision: int) -> AsyncGenerator[WatchBatch]:
        watch = self.inner.watch(self._outside(prefix), after_revision=after_revision)
        async with aclosing(watch):
            async for batch in watch:
                yield replace(batch, changes=tuple(map(self._change, batch.changes)))

    def _outside(self, key: str) -> str:
        if not key.startswith("/"):
            raise ValueError(f"{key!r} must begin with a slash to be below the prefix")
        return self._prefix + key

    def _inside(self, item: KeyValue) -> KeyValue:
        return item._replace(key=item.key[len(self._prefix) :])

    def _change(self, change: KeyChange) -> KeyChange:
        now = None if change.now is None else self._inside(change.now)
        return change._replace(key=change.key[len(self._prefix) :], now=now)
