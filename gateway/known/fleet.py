"""All that a gateway knows of its fleet, and keeps to itself when the store is away: table, keys, the file."""

import asyncio
from pathlib import Path

from gateway.access.access import Access
from gateway.access.keyring import Keyring
from gateway.known.keeper import TableKeeper
from gateway.known.keepsake import Keepsake
from gateway.known.keykeeper import KeyKeeper
from gateway.known.snapshot import SnapshotFile
from machinery.clock import Clock
from store.port import Transport


class KnownFleet:
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
        self.keeper = TableKeeper(transport, clock, site=site)
        self.keyring = Keyring(clock)
        self.access = Access(self.keyring, clock, is_on=asks_for_keys)
        self.key_keeper = KeyKeeper(transport, clock, self.keyring) if asks_for_keys else None
        """None where keys are not asked for."""
        self._keepsake: Keepsake | None = None
        if state_dir is not None:
            file = SnapshotFile(state_dir)
            self._keepsake = Keepsake(file, self.keeper, self.key_keeper, clock)

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
