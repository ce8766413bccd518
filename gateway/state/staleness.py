"""Staleness of the fleet state: the age of the store's last sign of life, from watches or a direct question."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Protocol

from machinery.clock import NEVER, Clock
from store.errors import StoreError, UnavailableError
from store.port import Transport

# Longer than the interval of watch progress reports, which our own etcd sends.
_SILENT_S = 7.0
# The age at which responses report a stale store.
STALE_S = 10.0
# The longest wait for an answer of the store; less than the time left until `STALE_S`, with a tick
# to spare.
_ASK_S = 2.0
_NOT_YET = -NEVER


class StoreWatch(Protocol):
    """One watch of the store."""

    def staleness_s(self) -> float | None:
        """Return the seconds since the last event; None before the first."""
        ...


class StalenessMonitor:
    """Measures the staleness. `listen` is called every second."""

    def __init__(self, transport: Transport, clock: Clock, watches: Sequence[StoreWatch]) -> None:
        self._transport = transport
        self._clock = clock
        self._watches = watches
        self._asked_at = self._answered_at = self._heard_at = _NOT_YET
        self.fresh_until_s = _NOT_YET
        """Time from which on the state is stale unless there is another sign of life. Read by every request."""

    @property
    def is_stale(self) -> bool:
        """True if the last sign of life, as of the last check, is older than `STALE_S`."""
        return self._clock.monotonic() > self.fresh_until_s

    def staleness_s(self) -> float | None:
        """Return the seconds since the last sign of life; None before the first."""
        self.check_watches()
        return None if self._heard_at == _NOT_YET else self._clock.monotonic() - self._heard_at

    def check_watches(self) -> None:
        """Update the time of the last sign of life."""
        self._heard_at = max(self._watched_at(), self._answered_at)
        self.fresh_until_s = self._heard_at + STALE_S

    async def listen(self, now_s: float) -> None:
        """Check for a sign of life; a silent store is asked."""
        if now_s - self._watched_at() > _SILENT_S and now_s - self._asked_at >= _SILENT_S:
            self._asked_at = now_s
            # A hanging etcd would answer only after its own timeouts, which is too late.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ASK_S):
                    if await self._answers():
                        self._answered_at = now_s
        self.check_watches()

    async def _answers(self) -> bool:
        """Return whether the store answers."""
        try:
            await self._transport.status()
        except UnavailableError:
            return False
        except StoreError:
            return True  # it refused to answer, so it is there
        return True

    def _watched_at(self) -> float:
        """Return the time of the last event of the watch that has been silent for longest."""
        silent = [watch.staleness_s() for watch in self._watches]
        known = [seconds for seconds in silent if seconds is not None]
        return self._clock.monotonic() - max(known) if len(known) == len(silent) else _NOT_YET
