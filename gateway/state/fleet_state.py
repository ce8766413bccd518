"""Keeps what is known in a file, and goes by the file when a gateway starts without the store.

All that a gateway knows of its fleet, and keeps to itself when the store is away: table, keys, the file.
"""

import asyncio
import logging
from datetime import datetime
from pathlib import Path

from gateway.auth.access_control import AccessControl
from gateway.auth.keyring import Keyring
from gateway.state.key_cache import KeyCache
from gateway.state.persistence import GatewaySnapshot, KnownKeys, SnapshotFile
from gateway.state.table_cache import TableCache
from machinery.clock import Clock
from store.port import Transport

log = logging.getLogger(__name__)

# How long a start waits for the store before it goes by the file.
_PATIENCE_S = 2.0
# A rollout changes endpoints many times; a file that is this old is good enough.
_EVERY_S = 5.0


class StatePersister:
    """The file's life beside the keepers'. Run `run()` in a task group."""

    def __init__(
        self,
        file: SnapshotFile,
        keeper: TableCache,
        key_keeper: KeyCache | None,
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

    async def _begin(self, snapshot: GatewaySnapshot) -> None:
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

    def _snapshot(self) -> GatewaySnapshot:
        if self._key_keeper is not None:
            # Keys that cannot be read now are kept as they were.
            self._keys = self._key_keeper.known() or self._keys
        return GatewaySnapshot(
            saved_at=self._clock.now(), known=self._keeper.known(), keys=self._keys
        )


class FleetState:
    """Run `run()` in a task group."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        *,
        asks_for_keys: bool,
        state_dir: Path | None,
        site: str,
    ) -> None:
        """`state_dir`: where what is known is kept, None: nowhere; `site`: where this gateway is."""
        self.keeper = TableCache(transport, clock, site=site)
        self.keyring = Keyring(clock)
        self.access = AccessControl(self.keyring, clock, is_on=asks_for_keys)
        self.key_keeper = KeyCache(transport, clock, self.keyring) if asks_for_keys else None
        """None where keys are not asked for."""
        self._keepsake: StatePersister | None = None
        if state_dir is not None:
            file = SnapshotFile(state_dir)
            self._keepsake = StatePersister(file, self.keeper, self.key_keeper, clock)

    async def settled(self) -> None:
        """Wait until there is something to go by, or nothing to wait for: two seconds at most."""
        if self._keepsake is not None:
            await self._keepsake.settled()

    def snapshot_age_s(self) -> float | None:
        """Return how old the file is that we go by; None if we go by the store."""
        return None if self._keepsake is None else self._keepsake.age_s()

    async def run(self) -> None:
        """Keep all of it like the store, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.keeper.run())
            if self.key_keeper is not None:
                group.create_task(self.key_keeper.run())
            if self._keepsake is not None:
                group.create_task(self._keepsake.run())
