"""Watch of the disk to which a process writes its state."""

import logging
import shutil
from pathlib import Path
from typing import Final

from machinery.clock import Clock
from machinery.single_query import SingleQuery

log = logging.getLogger(__name__)

_INTERVAL_S: Final = 30.0
_GIB: Final = 1 << 30


def is_almost_full(free_bytes: int, total_bytes: int, *, was: bool) -> bool:
    """Return whether a disk without models is almost full: logs and state are small. `was`: the last result."""
    return free_bytes < least_free_bytes(total_bytes) * (2 if was else 1)


def least_free_bytes(total_bytes: int) -> int:
    """Return the free bytes below which the disk is almost full."""
    return min(_GIB, total_bytes // 10)


class StateDisk:
    """Watches the disk of a process's state folder."""

    def __init__(self, folder: Path | None, clock: Clock) -> None:
        """`folder`: None: the process keeps no state."""
        self._folder = folder
        self._clock = clock
        self.full_folder = ""
        """The folder while its disk is almost full; empty otherwise."""

    async def run(self) -> None:
        """Look at the disk from time to time, forever."""
        folder = self._folder
        if folder is None:
            return
        disk = SingleQuery(lambda: shutil.disk_usage(folder))
        while True:
            usage, was = await disk.ask(), bool(self.full_folder)
            if usage is not None and was != is_almost_full(usage.free, usage.total, was=was):
                self.full_folder = "" if was else str(folder)
                extra = {"folder": str(folder), "free_bytes": usage.free}
                if was:
                    log.info("the disk of the state folder has room again", extra=extra)
                else:
                    log.warning("the disk of the state folder is almost full", extra=extra)
            await self._clock.sleep(_INTERVAL_S)
