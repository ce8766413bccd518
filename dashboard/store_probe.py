"""Probe of the store: reads a key twice a second, because watches of a frozen store look alive for long."""

from typing import Final

from machinery.clock import Clock
from store import keys
from store.errors import PermissionDeniedError, StoreError
from store.port import Transport

_PERIOD_S: Final = 0.5
_SLOW_S: Final = 2.0
"""An answer that takes longer is silence."""


class StoreProbe:
    """Reads one key again and again. Run `run()` in a task group."""

    def __init__(self, transport: Transport, clock: Clock) -> None:
        self._transport = transport
        self._clock = clock
        self._answered_s = clock.monotonic()

    def silent_s(self) -> float:
        """Return the seconds since the last answer; 0.0 while the store answers in time."""
        silent_s = self._clock.monotonic() - self._answered_s
        return silent_s if silent_s >= _PERIOD_S + _SLOW_S else 0.0

    async def run(self) -> None:
        """Ask forever."""
        while True:
            try:
                await self._transport.get(keys.ELECTION_RECONCILER)
            except PermissionDeniedError:
                pass  # a refusal is an answer
            except StoreError:
                await self._clock.sleep(_PERIOD_S)
                continue
            self._answered_s = self._clock.monotonic()
            await self._clock.sleep(_PERIOD_S)
