"""One watch for the agents of a whole process: each hears only of its own replicas. Reads; decides nothing.

A real agent watches all replicas by itself. A thousand hollow agents that did so in one process would spend it
on decoding the same documents a thousand times.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

from typing_extensions import override

from machinery.clock import Clock
from nodeagent.hollow.groups import Meetings
from schemas.deployment import ModelDeployment
from schemas.replica import Replica
from store import codec, keys
from store.cache.informer import Informer
from store.port import Transport

T = TypeVar("T")
_BY_NODE = "node"


class SharedFeed:
    """What the agents of one process hear of the store. `run()` it beside them."""

    def __init__(self, transport: Transport, clock: Clock) -> None:
        self._replicas = Informer(
            transport,
            keys.spec_prefix("Replica"),
            lambda item: codec.decode_object(Replica, item),
            clock,
        )
        self._replicas.index(_BY_NODE, _nodes_of)
        self._replicas.on_change(self._replica_changed)
        self._deployments = Informer(
            transport,
            keys.spec_prefix("ModelDeployment"),
            lambda item: codec.decode_object(ModelDeployment, item),
            clock,
        )
        self._deployments.on_change(self._deployment_changed)
        self.meetings = Meetings()
        """Where the ranks of this process's hollow Macs find each other."""
        self._assigned: dict[str, tuple[str, ...]] = {}
        """The nodes of each replica as they were last heard of, by key."""
        self._replica_handlers: dict[str, Callable[[str], None]] = {}
        self._deployment_handlers: dict[str, Callable[[str], None]] = {}

    async def run(self) -> None:
        """Keep up with the store, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._replicas.run())
            group.create_task(self._deployments.run())

    def replicas_of(self, node: str) -> "NodeFeed[Replica]":
        """Return what the node's agent hears of replicas."""
        return NodeFeed(
            node,
            lambda: _Mine(self._replicas.by_index(_BY_NODE, node), everybodys=self._replicas.items),
            self._replicas,
            self._replica_handlers,
        )

    def deployments_of(self, node: str) -> "NodeFeed[ModelDeployment]":
        """Return what the node's agent hears of deployments: everything."""
        return NodeFeed(
            node, lambda: self._deployments.items, self._deployments, self._deployment_handlers
        )

    def _replica_changed(self, key: str) -> None:
        found = self._replicas.items.get(key)
        now = _nodes_of(found) if found is not None else ()
        before = self._assigned.pop(key, ())
        if now:
            self._assigned[key] = now
        for node in dict.fromkeys((*before, *now)):
            handler = self._replica_handlers.get(node)
            if handler is not None:
                handler(key)

    def _deployment_changed(self, key: str) -> None:
        for handler in tuple(self._deployment_handlers.values()):
            handler(key)


class NodeFeed(Generic[T]):
    """One node's part of a shared cache (`nodeagent.parts.Feed`)."""

    def __init__(
        self,
        node: str,
        items: Callable[[], Mapping[str, T]],
        cache: Informer[T],
        handlers: dict[str, Callable[[str], None]],
    ) -> None:
        self._node = node
        self._items = items
        self._cache = cache
        self._handlers = handlers

    @property
    def items(self) -> Mapping[str, T]:
        return self._items()

    @property
    def synced(self) -> bool:
        return self._cache.synced

    def on_change(self, handler: Callable[[str], None]) -> None:
        self._handlers[self._node] = handler

    async def wait_synced(self) -> None:
        await self._cache.wait_synced()

    async def run(self) -> None:
        """Wait to be cancelled; the cache is run by who shares it. A later agent of the node may be there by then."""
        mine = self._handlers.get(self._node)
        if self.synced and mine is not None:
            for key in self.items:  # a cache that is there already tells its news to nobody anew
                mine(key)
        try:
            await asyncio.Event().wait()
        finally:
            if self._handlers.get(self._node) is mine:
                self._handlers.pop(self._node, None)


class _Mine(Mapping[str, T]):
    """The objects of one node to go through; asked for by key, everybody's are there."""

    def __init__(self, mine: Mapping[str, T], *, everybodys: Mapping[str, T]) -> None:
        self._mine = mine
        self._everybodys = everybodys

    @override
    def __getitem__(self, key: str) -> T:
        return self._everybodys[key]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._mine)

    @override
    def __len__(self) -> int:
        return len(self._mine)


def _nodes_of(replica: Replica) -> tuple[str, ...]:
    """Return the nodes that a replica concerns: those of its ranks, and those that had one."""
    now = (rank.node for rank in replica.spec.ranks)
    return (*now, *(rank.node for rank in replica.spec.leaving))
