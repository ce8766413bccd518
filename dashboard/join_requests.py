"""Machines that ask to join without a token, as rows of a view: an administrator answers them with `fleetctl approve`."""

import asyncio
from typing import Final

from dashboard.fleet_model import JOIN_REQUESTS, FleetModel
from insight.conditions import Row
from machinery.clock import Clock
from schemas.trust import PendingJoin
from store import codec, keys
from store.informer import Informer
from store.port import Transport

_PERIOD_S: Final = 0.5


class JoinRequests:
    """Follows the requests below `joinrequest/`. Run `run()` in a task group."""

    def __init__(self, transport: Transport, model: FleetModel, clock: Clock) -> None:
        self._requests = Informer(
            transport, keys.JOIN_REQUEST_PREFIX, lambda item: codec.decode(PendingJoin, item), clock
        )
        self._model = model
        self._clock = clock
        self._changed = asyncio.Event()
        self._requests.on_change(lambda _: self._changed.set())

    async def run(self) -> None:
        """Keep the rows of the view current, forever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._requests.run())
            await self._requests.wait_synced()
            while True:
                self._changed.clear()
                found = map(_row, self._requests.items.values())
                self._model.replace_rows(JOIN_REQUESTS, {str(one["name"]): one for one in found})
                await self._changed.wait()
                await self._clock.sleep(_PERIOD_S)


def _row(found: PendingJoin) -> Row:
    """Return a request without its certificate request and its key's hash."""
    return {
        "name": found.id,
        "node": found.name,
        "source": found.source,
        "chip": found.chip,
        "memoryBytes": found.memory_bytes,
        "created": found.created.isoformat(),
        "isApproved": found.is_issued,
    }
