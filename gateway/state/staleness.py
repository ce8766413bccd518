"""Whether the store is there: by what watches hear, and by asking where they have nothing to say. Keeps nothing of it."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Protocol

from machinery.clock import Clock
from store.errors import StoreError, UnavailableError
from store.port import Transport

# Longer than watches of a sound store are silent where it reports progress, as our own etcd does.
_SILENT_S = 7.0
# When clients are told that what we know may be out of date.
STALE_S = 10.0
# How long the store may take to say that it is there: less than is left until then, with a tick to spare.
_ASK_S = 2.0
_NEVER = float("-inf")


class StoreWatch(Protocol):
    """One watch of the store."""

    def staleness_s(self) -> float | None:
        """Return the seconds since it heard anything; None before the first time."""
        ...


class StalenessMonitor:
    """The one source of how old what is known may be. `listen` is called every second."""

    def __init__(self, transport: Transport, clock: Clock, watches: Sequence[StoreWatch]) -> None:
        self._transport = transport
        self._clock = clock
        self._watches = watches
        self._asked_at = self._answered_at = self._heard_at = _NEVER

    @property
    def is_stale(self) -> bool:
        """Whether the store was not heard for longer than `STALE_S`, by the last look; requests ask for it."""
        return self._clock.monotonic() - self._heard_at > STALE_S

    def staleness_s(self) -> float | None:
        """Return the seconds since the store was last heard, also by asking it; None before the first time."""
        self.look()
        return None if self._heard_at == _NEVER else self._clock.monotonic() - self._heard_at

    def look(self) -> None:
        """Note when the store was last heard: by all watches, or by its answer."""
        self._heard_at = max(self._watched_at(), self._answered_at)

    async def listen(self, now_s: float) -> None:
        """Find out whether the store is there; one that has nothing to say is asked."""
        if now_s - self._watched_at() > _SILENT_S and now_s - self._asked_at >= _SILENT_S:
            self._asked_at = now_s
            # An etcd that hangs would answer after its calls' own limits: staleness would be told too late.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ASK_S):
                    if await self._answers():
                        self._answered_at = now_s
        self.look()

    async def _answers(self) -> bool:
        """Return whether the store says anything."""
        try:
            await self._transport.status()
        except UnavailableError:
            return False
        except StoreError:
            return True  # it does not want to tell us; it is there
        return True

    def _watched_at(self) -> float:
        """Return when the watch was last heard that has been silent for longest."""
        silent = [watch.staleness_s() for watch in self._watches]
        known = [seconds for seconds in silent if seconds is not None]
        return self._clock.monotonic() - max(known) if len(known) == len(silent) else _NEVER
