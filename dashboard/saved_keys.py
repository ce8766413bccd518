"""API keys on disk: the hashes with which a dashboard checks logins if it starts while etcd is away.

The file is that of a gateway's saved state, with keys alone: `known.json`, mode 0600, in a folder of mode 0700.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gateway.state.key_cache import KeyCache
from gateway.state.persistence import GatewaySnapshot, KnownObjects, SnapshotFile
from machinery.clock import Clock
from schemas.records import ApiKey

log = logging.getLogger(__name__)

_PATIENCE_S: Final = 2.0
"""The store has this long to answer after the start, before the file is used."""
_EVERY_S: Final = 600.0
"""Without a change, the file is written again so often: its age is that of the last answer of the store."""


@dataclass(slots=True, kw_only=True)
class SavedKeys:
    """Keeps the file current, and uses it while the store has not answered. Run `run()` in a task group."""

    cache: KeyCache
    clock: Clock
    folder: Path | None
    """None: nothing is saved."""
    max_age_s: float
    """An older file is not used: the history beside it has nothing to show either."""
    patience_s: float = _PATIENCE_S
    _restored: Mapping[str, ApiKey] | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        """Follow the keys of the store."""
        self.cache.on_change(self._changed.set)

    def known(self) -> Mapping[str, ApiKey] | None:
        """Return the keys by name: those of the store, else those of the file; None if neither is known yet."""
        known = self.cache.known()
        return self._restored if known is None else known

    async def run(self) -> None:
        """Use the file if the store does not answer in time, then write it after each change, forever."""
        if self.folder is None:
            return
        file = SnapshotFile(self.folder)
        try:
            async with asyncio.timeout(self.patience_s):
                await self.cache.wait_synced()
        except TimeoutError:
            await self._restore(file)
            await self.cache.wait_synced()
        self._restored = None
        while True:
            # Cleared first: a change during the write leads to another one.
            self._changed.clear()
            await asyncio.to_thread(file.save, self._snapshot())
            log.debug("API keys saved for a start without etcd")
            await self._wait_until_due()

    async def _wait_until_due(self) -> None:
        """Wait for a change; without one, for the time after which the store has confirmed the keys again."""
        while not self._changed.is_set():
            try:
                async with asyncio.timeout(_EVERY_S):
                    await self._changed.wait()
            except TimeoutError:
                if self.cache.silent_s() == 0:
                    return

    def _snapshot(self) -> GatewaySnapshot:
        return GatewaySnapshot(
            saved_at=self.clock.now(), known=KnownObjects(), keys=self.cache.known()
        )

    async def _restore(self, file: SnapshotFile) -> None:
        snapshot = await asyncio.to_thread(file.read)
        if snapshot is None or snapshot.keys is None or self.cache.known() is not None:
            return
        age_s = (self.clock.now() - snapshot.saved_at).total_seconds()
        fields = {"saved_at": snapshot.saved_at.isoformat(), "age_s": round(age_s)}
        if not 0 <= age_s <= self.max_age_s:
            log.warning("the saved API keys are too old; logins wait for etcd", extra=fields)
            return
        log.warning(
            "etcd does not answer; logins are checked with the saved API keys", extra=fields
        )
        self._restored = snapshot.keys
        self.cache.restore(snapshot.keys)
