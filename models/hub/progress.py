"""Progress of a fetch: bytes, rate, time left, and what it waits for."""

from collections import deque
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from machinery.clock import Clock

FetchPhase: TypeAlias = Literal["Queued", "Listing", "Downloading", "Verifying", "Present"]
"""Queued: another fetch of the same files runs. Verifying: earlier bytes are hashed again, or the last ones now."""

# The rate is that of the last ten seconds: long enough for a steady figure, short enough to show a stall.
_RATE_WINDOW_S: Final = 10.0
_SAMPLES: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchProgress:
    """The progress of one fetch at one moment."""

    phase: FetchPhase
    total_bytes: int
    """Bytes of all chosen files; 0 before the list is known."""
    present_bytes: int
    """Bytes that are on the disk, from earlier fetches too."""
    fetched_bytes: int
    """Bytes that this fetch received, what was fetched twice included."""
    files: int
    files_present: int
    bytes_per_s: float
    eta_s: float | None
    """Seconds to the end at this rate; None if nothing arrives."""
    source: str
    """Host that the bytes come from."""
    waiting: str
    """Sentence about why nothing arrives, such as a rate limit; empty while bytes arrive."""

    @property
    def percent(self) -> int:
        """Return the whole percentage of bytes that are on the disk."""
        return 100 * self.present_bytes // self.total_bytes if self.total_bytes else 0


class FetchMonitor:
    """The counters of one fetch; the fetcher writes them, and anything may take a snapshot at any time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, int]] = deque(maxlen=_SAMPLES)
        self.phase: FetchPhase = "Queued"
        self.total_bytes = 0
        self.present_bytes = 0
        self.fetched_bytes = 0
        self.files = 0
        self.files_present = 0
        self.source = ""
        self.waiting = ""

    def add_fetched(self, count: int) -> None:
        """Count bytes that arrived from the hub."""
        self.fetched_bytes += count
        now = self._clock.monotonic()
        # At most one sample for each part of the window: a fast link brings thousands of chunks a second.
        if not self._samples or now - self._samples[-1][0] >= _RATE_WINDOW_S / _SAMPLES:
            self._samples.append((now, self.fetched_bytes))

    def snapshot(self) -> FetchProgress:
        """Return the progress now."""
        rate = self._bytes_per_s()
        left = max(0, self.total_bytes - self.present_bytes)
        return FetchProgress(
            phase=self.phase,
            total_bytes=self.total_bytes,
            present_bytes=self.present_bytes,
            fetched_bytes=self.fetched_bytes,
            files=self.files,
            files_present=self.files_present,
            bytes_per_s=rate,
            eta_s=left / rate if rate > 0 else None,
            source=self.source,
            waiting=self.waiting,
        )

    def _bytes_per_s(self) -> float:
        now = self._clock.monotonic()
        while self._samples and self._samples[0][0] < now - _RATE_WINDOW_S:
            self._samples.popleft()
        if not self._samples:
            return 0.0
        at, count = self._samples[0]
        return (self.fetched_bytes - count) / (now - at) if now > at else 0.0
