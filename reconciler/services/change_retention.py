"""Retention of the audit log: the leader removes records of changes that are too old or too many."""

import logging
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from machinery.clock import Clock
from store import keys
from store.errors import StoreError
from store.port import Delete, Transport

log = logging.getLogger(__name__)

KEPT_DAYS: Final = 30
MOST_RECORDS: Final = 10_000
_EVERY_S: Final = 3600.0
_AT_ONCE: Final = 100
_DAY_MS: Final = 24 * 3600 * 1000


def surplus_records(found: Sequence[str], now_ms: int) -> list[str]:
    """Return the keys to remove, oldest first. `found`: all keys in order. Pure.

    Ages count from the newest record if the clock is ahead of it, so that a wrong clock removes nothing that is new.
    """
    if not found:
        return []
    newest_ms = min(now_ms, keys.change_time_ms(found[-1]))
    oldest_ms = newest_ms - KEPT_DAYS * _DAY_MS
    too_many = max(0, len(found) - MOST_RECORDS)
    return [
        key
        for number, key in enumerate(found)
        if number < too_many or keys.change_time_ms(key) < oldest_ms
    ]


@dataclass(frozen=True, slots=True)
class ChangeRetention:
    """Removes surplus records once an hour. Run `run()` while this process leads."""

    transport: Transport
    clock: Clock

    async def run(self) -> None:
        """Remove surplus records forever."""
        while True:
            try:
                await self.remove_surplus()
            except StoreError as error:
                log.info("old records of changes are not removed", extra={"why": str(error)})
            await self.clock.sleep(_EVERY_S)

    async def remove_surplus(self) -> None:
        """Remove surplus records now. Raises StoreError."""
        found: list[str] = []
        async with aclosing(self.transport.pages(keys.CHANGE_PREFIX)) as pages:
            async for page in pages:
                found += [item.key for item in page.items]
        surplus = surplus_records(found, int(self.clock.now().timestamp() * 1000))
        for start in range(0, len(surplus), _AT_ONCE):
            gone = surplus[start : start + _AT_ONCE]
            await self.transport.commit([], [Delete(key=key) for key in gone])
        if surplus:
            log.info("old records of changes removed", extra={"count": len(surplus)})
