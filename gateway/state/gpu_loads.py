"""The measured GPU load of Macs, as their agents report it in the store."""

import asyncio
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from machinery.clock import Clock
from schemas.node import NodeLoad
from store import codec, keys
from store.informer import Informer
from store.port import Transport

_TICK_S: Final = 1.0


class GpuLoads:
    """GPU load by node, 0..1; unknown for Macs that are missing. Run `run()` in a task group."""

    def __init__(self, transport: Transport, clock: Clock, *, is_stale: Callable[[], bool]) -> None:
        """`is_stale`: whether the store has been silent for too long; then every load is unknown."""
        self._clock, self._is_stale = clock, is_stale
        self._loads: dict[str, float] = {}
        self.by_node: Mapping[str, float] = MappingProxyType(self._loads)
        """A live view."""
        self._informer: Informer[NodeLoad] = Informer(
            transport, keys.LOAD_PREFIX, lambda item: codec.decode(NodeLoad, item), clock
        )
        self._informer.on_change(self._note)

    async def run(self) -> None:
        """Keep the loads current, forever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._informer.run())
            was_stale = False
            while True:
                await self._clock.sleep(_TICK_S)
                is_stale = self._is_stale()
                if is_stale:
                    self._loads.clear()
                elif was_stale:
                    for key in self._informer.items:
                        self._note(key)
                was_stale = is_stale

    def _note(self, key: str) -> None:
        load, node = self._informer.items.get(key), key.removeprefix(keys.LOAD_PREFIX)
        if load is None:
            self._loads.pop(node, None)
        else:
            self._loads[node] = load.gpu_percent / 100
