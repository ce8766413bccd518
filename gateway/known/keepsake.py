"""Keeps what is known in a file, and goes by the file when a gateway starts without the store."""

import asyncio
import logging
from datetime import datetime

from gateway.known.keeper import TableKeeper
from gateway.known.keykeeper import KeyKeeper
from gateway.known.snapshot import KnownKeys, Snapshot, SnapshotFile
from machinery.clock import Clock

log = logging.getLogger(__name__)

# How long a start waits for the store before it goes by the file.
_PATIENCE_S = 2.0
# A rollout changes endpoints many times; a file that is this old is good enough.
_EVERY_S = 5.0


class Keepsake:
    """The file's life beside the keepers'. Run `run()` in a task group."""

    def __init__(
        self,
        file: SnapshotFile,
        keeper: TableKeeper,
        key_keeper: KeyKeeper | None,
        clock: Clock,
        *,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """`key_keeper`: None where keys are not asked for."""
        self._file = file
        self._keeper = keeper
        self._key_keeper = key_keeper
        self._clock = clock
        self._patience_s = patience_s
        self._news = asyncio.Event()
        self._settled = asyncio.Event()
        self._keys: KnownKeys | None = None
        self._saved_at: datetime | None = None
        keeper.on_news(self._news.set)
        if key_keeper is not None:
            key_keeper.on_news(self._news.set)

    def age_s(self) -> float | None:
        """Return how old what we go by is; None if that is not the file."""
        if self._keeper.source != "snapshot" or self._saved_at is None:
            return None
        return max(0.0, (self._clock.now() - self._saved_at).total_seconds())

    async def settled(self) -> None:
        """Wait until the store was heard, or the file is in force, or there is none."""
        await self._settled.wait()

    async def run(self) -> None:
        """Begin with the file if need be, then keep it up to date, for ever."""
        snapshot = await asyncio.to_thread(self._file.read)
        if snapshot is not None:
            await self._begin(snapshot)
        self._settled.set()
        while True:
            await self._news.wait()
            self._news.clear()
            if self._keeper.source == "store":
                # Encoded and written beside the requests: a disk may take its time.
                await asyncio.to_thread(self._file.save, self._snapshot())
                await self._clock.sleep(_EVERY_S)

    async def _begin(self, snapshot: Snapshot) -> None:
        self._keys = snapshot.keys
        try:
            async with asyncio.timeout(self._patience_s):
                await self._keeper.wait_synced()
                if self._key_keeper is not None:
                    await self._key_keeper.wait_synced()
        except TimeoutError:
            self._saved_at = snapshot.saved_at
            log.warning(
                "the store was not heard in time; going by what was kept of it",
                extra={"saved_at": snapshot.saved_at.isoformat()},
            )
            if self._key_keeper is not None and snapshot.keys is not None:
                self._key_keeper.suppose(snapshot.keys)
            # Only its keys may be missing: gateways' role of an earlier release may not read them.
            if not self._keeper.is_synced:
                self._keeper.suppose(snapshot.known)
                await self._keeper.changed(within_s=1.0)

    def _snapshot(self) -> Snapshot:
        if self._key_keeper is not None:
            # Keys that cannot be read now are kept as they were.
            self._keys = self._key_keeper.known() or self._keys
        return Snapshot(saved_at=self._clock.now(), known=self._keeper.known(), keys=self._keys)
