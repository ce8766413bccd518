"""Reports the measured GPU load of this Mac to gateways, in the store under the node's lease.

Only changes of ten points and more are written, and at most one in each period of the sampler: a thousand busy Macs write
less than the leases that they renew. Why the store: docs/adr/0022-routing.md.
"""

import logging
from collections.abc import Callable
from typing import Final

from machinery.backoff import Backoff, Retries
from machinery.clock import Clock
from nodeagent.hardware.load import PERIOD_S, LoadReading
from schemas.node import NodeLoad
from store import codec, keys
from store.errors import PermissionDeniedError, StoreError
from store.port import Delete, Put, Transport

log = logging.getLogger(__name__)

_STEP: Final = 10
"""Percent points; 2 of the points with which the strategy HardwareAware compares Macs."""
_BACKOFF: Final = Backoff(first_s=10.0, limit_s=300.0)


class LoadReport:
    """Keeps the node's load in the store. Run `run()` in a task group."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        *,
        node: str,
        latest: Callable[[], LoadReading],
        period_s: float = PERIOD_S,
    ) -> None:
        self._transport, self._clock = transport, clock
        self._key = keys.load_key(node)
        self._latest, self._period_s = latest, period_s
        self._written: tuple[int, int] | None = None
        """Percent, and the lease that it is below; None if nothing is written."""

    async def run(self, lease: Callable[[], int | None]) -> None:
        """Write until cancelled. `lease`: the node's; None while it has none."""
        retries = Retries(_BACKOFF, self._clock)
        while True:
            await self._clock.sleep(self._period_s)
            held = lease()
            if held is None:
                continue
            try:
                await self._write(held)
            except StoreError as error:
                log.debug("load not written", extra={"why": str(error)})
                # The roles of an earlier release lack the right, until `fleetctl init-auth` runs again.
                await retries.wait(is_refused=isinstance(error, PermissionDeniedError))
                continue
            retries.reset()

    async def _write(self, lease: int) -> None:
        ratio = self._latest().sensors.gpu_ratio
        if ratio is None:
            if self._written is not None:
                await self._transport.commit([], [Delete(key=self._key)])
                self._written = None
            return
        percent = round(100 * ratio)
        if self._written is not None:
            before, below = self._written
            if below == lease and abs(percent - before) < _STEP:
                return
        value = codec.encode(NodeLoad(gpu_percent=percent))
        await self._transport.commit([], [Put(key=self._key, value=value, lease=lease)])
        self._written = percent, lease
