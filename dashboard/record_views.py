"""Views of records in the store: changes as they are written, and machines that ask to join without a token."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

from dashboard.fleet_model import CHANGES, JOIN_REQUESTS, FleetModel
from insight.changes import ChangeFilter, RecordedChange, change_tree, read_change, select_changes
from insight.conditions import Row
from machinery.clock import Clock
from schemas.trust import PendingJoin
from store import codec, keys
from store.informer import Informer
from store.port import KeyValue, Transport

MOST_SHOWN: Final = 100
"""Changes in the view: earlier ones are asked for by their filters."""
_PERIOD_S: Final = 0.5


async def show_records(
    records: Informer[Any],
    model: FleetModel,
    view: str,
    rows: Callable[[], Mapping[str, Row]],
    clock: Clock,
) -> None:
    """Follow the records, and keep the rows of a view current, forever."""
    changed = asyncio.Event()
    records.on_change(lambda _: changed.set())
    async with asyncio.TaskGroup() as group:
        group.create_task(records.run())
        await records.wait_synced()
        while True:
            changed.clear()
            model.replace_rows(view, rows())
            await changed.wait()
            await clock.sleep(_PERIOD_S)


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

    async def select(self, wanted: ChangeFilter) -> list[RecordedChange] | None:
        """Return the wanted changes, oldest first; None while the store has not answered yet."""
        if not self._records.synced:
            return None
        items = list(self._records.items.values())
        # Thousands of documents take a while; the event loop goes on meanwhile.
        return await asyncio.to_thread(select_changes, items, wanted)

    async def run(self) -> None:
        """Keep the rows of the view current, forever."""
        await show_records(self._records, self._model, CHANGES, self._newest, self._clock)

    def _newest(self) -> dict[str, Row]:
        # Keys begin with the time of the write; the order of two writers is that of the store.
        newest = sorted(self._records.items)[-MOST_SHOWN:]
        changes = (read_change(self._records.items[key]) for key in newest)
        trees = [change_tree(change) for change in changes if change is not None]
        return {str(tree["id"]): {"name": tree["id"], **tree} for tree in trees}


async def show_join_requests(transport: Transport, model: FleetModel, clock: Clock) -> None:
    """Keep the requests below `joinrequest/` in their view, forever: `fleetctl approve` answers them."""
    requests: Informer[PendingJoin] = Informer(
        transport, keys.JOIN_REQUEST_PREFIX, lambda item: codec.decode(PendingJoin, item), clock
    )

    def rows() -> dict[str, Row]:
        """Return them without their certificate requests and the hashes of their keys."""
        return {
            request.id: {
                "name": request.id,
                "node": request.name,
                "source": request.source,
                "chip": request.chip,
                "memoryBytes": request.memory_bytes,
                "created": request.created.isoformat(),
                "isApproved": request.is_issued,
            }
            for request in requests.items.values()
        }

    await show_records(requests, model, JOIN_REQUESTS, rows, clock)
