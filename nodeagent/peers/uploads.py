"""The uploads of one agent: a few at a time, within a rate that falls while an engine of the Mac works.

A tenth of what a Mac may send can be all that its network carries, so a tenth of the network is a limit of its own then.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Final

from machinery.clock import Clock
from machinery.prometheus import Counter
from models.hub.bandwidth import BandwidthLimit

MOST_UPLOADS: Final = 4
DEFAULT_BYTES_PER_S: Final = 1 << 30
# Tokens of people come before files of Macs.
_SHARE_WHILE_BUSY: Final = 0.1


class Uploads:
    """Counts the files that are being sent, and limits their bytes a second."""

    def __init__(
        self,
        clock: Clock,
        *,
        bytes_per_s: float = DEFAULT_BYTES_PER_S,
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_busy` says whether an engine of this Mac generates; an agent sets it when it knows its engines."""
        self.most: Final = MOST_UPLOADS
        self.bandwidth: Final = BandwidthLimit(clock, bytes_per_s=bytes_per_s)
        self._own_limit = self._bytes_per_s = bytes_per_s
        self.is_busy = is_busy
        self.link_rate: Callable[[str], float | None] = lambda _: None
        """Returns the bytes a second of the network of a local address; None for those that requests do not use."""
        self._links: dict[str, BandwidthLimit] = {}
        self._clock = clock
        self._running = 0
        self._left = asyncio.Event()
        self._sent = Counter(
            "fleet_blob_sent_bytes_total", "Bytes of files that were sent to other agents.", ()
        )

    def set_pool_limit(self, bytes_per_s: float | None) -> None:
        """Obey the limit of the node's pools as well; None for none."""
        self._bytes_per_s = min(self._own_limit, bytes_per_s or self._own_limit)
        self._follow_engines()

    def _follow_engines(self) -> None:
        self.bandwidth.set_rate(self._bytes_per_s * (_SHARE_WHILE_BUSY if self.is_busy() else 1.0))

    async def take(self, count: int, address: str) -> None:
        """Wait until `count` bytes may be sent from a local address."""
        await self.bandwidth.take(count)
        rate = self.link_rate(address) if self.is_busy() else None
        link = self._links.setdefault(address, BandwidthLimit(self._clock))
        link.set_rate(None if rate is None else rate * _SHARE_WHILE_BUSY)
        await link.take(count)

    def enter(self) -> bool:
        """Take a place; False if there is none."""
        if self._running >= self.most:
            return False
        self._running += 1
        return True

    async def wait(self) -> None:
        """Take a place as soon as there is one."""
        while not self.enter():
            self._left.clear()
            await self._left.wait()

    def leave(self) -> None:
        """Give a place back."""
        self._running -= 1
        self._left.set()

    def count(self, sent: int) -> None:
        """Count bytes, and follow the engines with the limit."""
        self._sent.add(count=sent)
        self._follow_engines()

    def lines(self) -> Iterator[str]:
        """Yield the metrics in Prometheus' text format."""
        yield from self._sent.lines()
