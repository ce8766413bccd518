"""The audit log as the dashboard knows it: every record as it is written, and the newest ones as rows of a view."""

import asyncio
from typing import Final

from dashboard.fleet_model import CHANGES, FleetModel
from insight.changes import ChangeFilter, RecordedChange, change_tree, read_change, select_changes
from machinery.clock import Clock
from store import keys
from store.informer import Informer
from store.port import KeyValue, Transport

MOST_SHOWN: Final = 100
"""Records in the view: earlier ones are asked for by their filters."""
_PERIOD_S: Final = 0.5


class ChangeLog:
    """Follows the records below `change/`. Run `run()` in a task group.

    They are kept as they are in the store: the reconciler keeps 10,000 there, and few are ever read.
    """

    def __init__(self, transport: Transport, model: FleetModel, clock: Clock) -> None:
        self._records: Informer[KeyValue] = Informer(
            transport, keys.CHANGE_PREFIX, lambda item: item, clock
        )
        self._model = model
        self._clock = clock
        self._changed = asyncio.Event()
        self._records.on_change(lambda _: self._changed.set())

    async def select(self, wanted: ChangeFilter) -> list[RecordedChange] | None:
        """Return the wanted changes, oldest first; None while the store has not answered yet."""
        if not self._records.synced:
            return None
        items = list(self._records.items.values())
        # Thousands of documents take a while; the event loop goes on meanwhile.
        return await asyncio.to_thread(select_changes, items, wanted)

    async def run(self) -> None:
        """Keep the rows of the view current, forever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._records.run())
            await self._records.wait_synced()
            while True:
                self._changed.clear()
                self._model.replace_rows(CHANGES, self._newest())
                await self._changed.wait()
                await self._clock.sleep(_PERIOD_S)

    def _newest(self) -> dict[str, dict[str, object]]:
        # Keys begin with the time of the write; the order of two writers is that of the store.
        newest = sorted(self._records.items)[-MOST_SHOWN:]
        found = (read_change(self._records.items[key]) for key in newest)
        known = [change_tree(change) for change in found if change is not None]
        return {str(one["id"]): {"name": one["id"], **one} for one in known}
