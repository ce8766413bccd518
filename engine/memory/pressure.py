"""Memory pressure: two water marks, and the measures at each of them. Pure.

The marks are shares of the memory beside the weights. Weights always stay; with marks on the total, a model that nearly
fills its Mac would be above them from its first request on. No measure ends a running sequence.
"""

from dataclasses import dataclass
from enum import IntEnum

# MLX itself starts to free buffers at 0.95 of the recommended size (mlx/backend/metal/allocator.cpp).
LOW, HIGH = 0.85, 0.95
# Pressure returns to normal only below this share: otherwise a sequence that comes and goes at the low mark would empty
# the caches each time.
_RELEASE = 0.80
# Unused buffers below this share are not worth the time to allocate them again.
_WORTH_CLEARING = 0.02


class PressureLevel(IntEnum):
    """Levels of memory pressure."""

    NORMAL = 0
    TIGHT = 1
    CRITICAL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """The memory in use, in bytes."""

    active_bytes: int
    """MLX's arrays, including weights and prefix cache."""
    buffer_bytes: int
    """Buffers of freed arrays that MLX keeps."""
    prefix_bytes: int
    """The prefix cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPressure:
    """The result of the last reading."""

    level: PressureLevel = PressureLevel.NORMAL
    prefix_cap_bytes: int | None = None
    """The limit of the prefix cache under this pressure; None adds no limit."""

    @property
    def chunk_factor(self) -> float:
        """The factor for the size of prompt pieces; 0 means the smallest pieces."""
        return {PressureLevel.NORMAL: 1.0, PressureLevel.TIGHT: 0.5, PressureLevel.CRITICAL: 0.0}[
            self.level
        ]


def assess(
    before: MemoryPressure, reading: MemoryReading, *, limit_bytes: int, weights_bytes: int
) -> MemoryPressure:
    """Return the current pressure.

    CRITICAL lasts until the low mark, TIGHT until a little below it. The limit of the prefix cache is set once, when
    memory becomes tight: to half of its size at that time.
    """
    level = _level(before.level, _used_share(reading, limit_bytes, weights_bytes))
    cap = before.prefix_cap_bytes
    if level is PressureLevel.NORMAL:
        cap = None
    elif level is PressureLevel.CRITICAL:
        cap = 0
    elif cap is None:
        cap = reading.prefix_bytes // 2
    return MemoryPressure(level=level, prefix_cap_bytes=cap)


def should_clear_buffers(
    now: MemoryPressure, reading: MemoryReading, *, limit_bytes: int, weights_bytes: int
) -> bool:
    """Return whether MLX should return its unused buffers."""
    available = limit_bytes - weights_bytes
    return now.level > PressureLevel.NORMAL and reading.buffer_bytes > _WORTH_CLEARING * available


def _used_share(reading: MemoryReading, limit_bytes: int, weights_bytes: int) -> float:
    """Return the used share of the memory beside the weights; 1 if there is no such memory and some is used."""
    used = reading.active_bytes + reading.buffer_bytes - weights_bytes
    available = limit_bytes - weights_bytes
    if available <= 0:
        return 1.0 if used > 0 else 0.0
    return used / available


def _level(before: PressureLevel, share: float) -> PressureLevel:
    if share >= HIGH or (before is PressureLevel.CRITICAL and share >= LOW):
        return PressureLevel.CRITICAL
    if share >= LOW or (before > PressureLevel.NORMAL and share >= _RELEASE):
        return PressureLevel.TIGHT
    return PressureLevel.NORMAL
