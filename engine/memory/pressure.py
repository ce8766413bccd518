"""How near memory is to its end, with two water marks, and what is given up at each. Pure.

Marks are parts of what lies above the weights: those stay whatever happens, and of a model that nearly fills its Mac
the first request would otherwise be the last. Nothing here ends a sequence that runs.
"""

from dataclasses import dataclass
from enum import IntEnum

# MLX itself begins to collect at 0.95 of what is recommended (mlx/backend/metal/allocator.cpp).
LOW, HIGH = 0.85, 0.95
# What has to be given back before all is well again: without it, one sequence that comes and goes at the mark would
# empty the caches each time.
_RELEASE = 0.80
# Unused buffers below this part of the room are not worth the time of making them anew.
_WORTH_CLEARING = 0.02


class PressureLevel(IntEnum):
    """How bad it is."""

    NORMAL = 0
    TIGHT = 1
    CRITICAL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """What is held now, in bytes."""

    active_bytes: int
    """In MLX's arrays, weights and prefix cache included."""
    buffer_bytes: int
    """What MLX keeps of freed arrays."""
    prefix_bytes: int
    """What the prefix cache holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPressure:
    """What was found at the last look."""

    level: PressureLevel = PressureLevel.NORMAL
    prefix_cap_bytes: int | None = None
    """What the prefix cache may hold because of it; None: as much as it otherwise may."""

    @property
    def chunk_factor(self) -> float:
        """By what the pieces of prompts are to be multiplied; 0 asks for the smallest there are."""
        return {PressureLevel.NORMAL: 1.0, PressureLevel.TIGHT: 0.5, PressureLevel.CRITICAL: 0.0}[
            self.level
        ]


def assess(
    before: MemoryPressure, reading: MemoryReading, *, limit_bytes: int, weights_bytes: int
) -> MemoryPressure:
    """Return the pressure now.

    Critical lasts until the low mark, Tight until a little below it. What the prefix cache is cut down to is decided
    once, when it becomes tight: half of what it holds then.
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
    """Whether MLX's unused buffers are to be given back."""
    room = limit_bytes - weights_bytes
    return now.level > PressureLevel.NORMAL and reading.buffer_bytes > _WORTH_CLEARING * room


def _used_share(reading: MemoryReading, limit_bytes: int, weights_bytes: int) -> float:
    """Return the part of the room that is taken; without any room, what is taken is all of it."""
    taken = reading.active_bytes + reading.buffer_bytes - weights_bytes
    room = limit_bytes - weights_bytes
    if room <= 0:
        return 1.0 if taken > 0 else 0.0
    return taken / room


def _level(before: PressureLevel, part: float) -> PressureLevel:
    if part >= HIGH or (before is PressureLevel.CRITICAL and part >= LOW):
        return PressureLevel.CRITICAL
    if part >= LOW or (before > PressureLevel.NORMAL and part >= _RELEASE):
        return PressureLevel.TIGHT
    return PressureLevel.NORMAL
