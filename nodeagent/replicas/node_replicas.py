"""The Replicas that concern one node: its copies below `assignment/<node>/` while the leader keeps them, else all.

docs/adr/0105-assignments-below-their-node.md has the rules.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from machinery.backoff import Backoff, Retries
from machinery.clock import Clock
from schemas.replica import Replica
from store import codec, keys
from store.errors import StoreError
from store.informer import Informer
from store.port import Transport

log = logging.getLogger(__name__)

# The mark ends with its leader, and the next one writes it within seconds. Thousands of agents miss it at one moment.
_LOOK: Final = Backoff(first_s=30.0, limit_s=240.0)
_POLL_S: Final = 0.5


class NodeReplicas:
    """A cache of the Replicas that concern a node (`nodeagent.dependencies.ObjectCache`), by their spec key."""

    def __init__(
        self, transport: Transport, clock: Clock, node: str, *, look: Backoff = _LOOK
    ) -> None:
        """Prepare; `run()` reads. `look`: the waits before a missing mark means that the leader keeps no copies."""
        self._transport = transport
        self._clock = clock
        self._node = node
        self._looks = Retries(look, clock)
        self._handlers: list[Callable[[str], None]] = []
        self._mark = Informer(transport, keys.ASSIGNMENTS_KEPT, lambda item: item.key, clock)
        self._mark_changed = asyncio.Event()
        self._mark.on_change(lambda _: self._mark_changed.set())
        self._cache: Informer[Any] = self._mark
        self._served: Informer[Replica] | None = None
        self._items: Mapping[str, Replica] = {}
        self._synced = asyncio.Event()
        self.is_narrow = False
        """True while only the node's own copies are watched."""

    @property
    def items(self) -> Mapping[str, Replica]:
        return self._items

    @property
    def synced(self) -> bool:
        """True once the first list is complete."""
        return self._synced.is_set()

    @property
    def refusal(self) -> str:
        return self._cache.refusal

    def staleness_s(self) -> float | None:
        return self._cache.staleness_s()

    def on_change(self, handler: Callable[[str], None]) -> None:
        self._handlers.append(handler)

    async def wait_synced(self) -> None:
        await self._synced.wait()

    async def run(self) -> None:
        """Keep the cache in sync until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._mark.run())
            await _has_list(self._mark)
            may_be_narrow, watching = True, None
            while True:
                is_narrow = may_be_narrow and self._is_kept
                cache = self._copies() if is_narrow else self._all()
                if not self.synced:
                    self._cache = cache
                task = group.create_task(cache.run())
                # While the new cache is read, the one before serves.
                if is_narrow and not await _has_list(cache):
                    task.cancel()  # a role of an earlier release: see docs/operations/security.md
                    if self.synced:
                        await self._looks.wait()
                    may_be_narrow = self.synced
                    continue
                await cache.wait_synced()
                self._take(cache, is_narrow=is_narrow)
                if watching is not None:
                    watching.cancel()
                watching = task
                if is_narrow:
                    await self._until_not_kept()
                elif may_be_narrow:
                    await self._until_kept()
                else:
                    await self._looks.wait()  # the right may be granted later
                may_be_narrow = True

    @property
    def _is_kept(self) -> bool:
        return bool(self._mark.items)

    def _all(self) -> Informer[Replica]:
        cache = Informer(
            self._transport,
            keys.spec_prefix("Replica"),
            lambda item: codec.decode_object(Replica, item),
            self._clock,
        )
        cache.on_change(lambda key: self._tell(key) if cache is self._served else None)
        return cache

    def _copies(self) -> Informer[Replica]:
        prefix = keys.assignment_prefix(self._node)
        cache = Informer(
            self._transport, prefix, lambda item: codec.decode_copy(Replica, item), self._clock
        )

        def changed(key: str) -> None:
            if cache is self._served:
                self._items = _by_spec_key(cache)
                self._tell(keys.spec_key("Replica", key.removeprefix(prefix)))

        cache.on_change(changed)
        return cache

    def _take(self, cache: Informer[Replica], *, is_narrow: bool) -> None:
        """Serve the cache, and tell what differs from the one before."""
        before = self._items
        self._cache = self._served = cache
        self.is_narrow = is_narrow
        self._items = _by_spec_key(cache) if is_narrow else cache.items
        self._synced.set()
        log.info("watching replicas", extra={"of": self._node if is_narrow else "all nodes"})
        for key in {**before, **self._items}:
            if _version(before.get(key)) != _version(self._items.get(key)):
                self._tell(key)

    def _tell(self, key: str) -> None:
        for handler in self._handlers:
            handler(key)

    async def _until_kept(self) -> None:
        while not self._is_kept:
            self._mark_changed.clear()
            await self._mark_changed.wait()

    async def _until_not_kept(self) -> None:
        """Return once a process leads that keeps no copies. Without any leader, nothing changes."""
        while True:
            self._mark_changed.clear()
            if self._is_kept:
                self._looks.reset()
                await self._mark_changed.wait()
                continue
            try:
                async with asyncio.timeout(self._looks.next_delay_s()):
                    await self._mark_changed.wait()
            except TimeoutError:
                if await self._is_led_without_copies():
                    return

    async def _is_led_without_copies(self) -> bool:
        try:
            leader = await self._transport.get(keys.ELECTION_RECONCILER)
            return leader is not None and await self._transport.get(keys.ASSIGNMENTS_KEPT) is None
        except StoreError as error:
            log.debug("the election was not read", extra={"why": str(error)})
            return False


async def _has_list(cache: Informer[Any]) -> bool:
    """Wait for the first list of a cache; return False if the store refuses it."""
    while not cache.synced and not cache.refusal:
        try:
            async with asyncio.timeout(_POLL_S):
                await cache.wait_synced()
        except TimeoutError:
            continue
    return cache.synced


def _by_spec_key(cache: Informer[Replica]) -> dict[str, Replica]:
    return {keys.spec_key("Replica", one.name): one for one in cache.items.values()}


def _version(replica: Replica | None) -> str:
    return "" if replica is None else replica.metadata.resource_version
