"""The memory guard of the batch: admits jobs, and says what to give up when memory is short. Deterministic; no mlx."""

from dataclasses import dataclass, field

from engine.jobs import Job
from engine.memory import pressure
from engine.memory.budget import MemoryBudget
from engine.memory.pressure import MemoryPressure, MemoryReading, PressureLevel


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAdvice:
    """The measures to take before the next step."""

    prefix_limit_bytes: int
    """Trim the prefix cache to this size."""
    chunk_factor: float
    """Multiply the size of prompt pieces by this; 0 means the smallest pieces."""
    may_join: bool
    """True if sequences may join at all; `MemoryGuard.may_join` decides for each one."""
    clear_buffers: bool
    """Return MLX's unused buffers to the system."""


@dataclass(slots=True, kw_only=True)
class MemoryGuard:
    """The memory promised to running jobs, and the pressure of the last reading."""

    budget: MemoryBudget
    _lengths: dict[int, int] = field(default_factory=dict)
    _pressure: MemoryPressure = field(default_factory=MemoryPressure)

    @property
    def promised_bytes(self) -> int:
        """The most bytes that the running jobs will hold."""
        return self.budget.needs(self._lengths.values())

    @property
    def level(self) -> PressureLevel:
        """The pressure of the last reading."""
        return self._pressure.level

    def may_join(self, *jobs: Job) -> bool:
        """Return whether there is room for these jobs together, until they end, beside the running ones.

        A single job may always join an empty batch: `MemoryBudget.refuse` has refused jobs that do not fit alone, and
        waiting would not free any memory.
        """
        if not self._lengths and len(jobs) == 1:
            return True
        if self._lengths and self._pressure.level is PressureLevel.CRITICAL:
            return False
        return self.budget.fits([*self._lengths.values(), *map(_length, jobs)])

    def reserve(self, job: Job) -> None:
        """Reserve memory for a job, from the first piece of its prompt on."""
        self._lengths[job.id] = _length(job)

    def release(self, job_id: int) -> None:
        """Release the memory of a job that has ended, whether or not it ever ran."""
        self._lengths.pop(job_id, None)

    def advise(self, active_bytes: int, buffer_bytes: int, prefix_bytes: int) -> MemoryAdvice:
        """Take a reading before a step; return the measures to take first.

        Call it again after `reserve`: the prefix cache gives up the memory that a new job needs.
        """
        budget = self.budget
        reading = MemoryReading(
            active_bytes=active_bytes, buffer_bytes=buffer_bytes, prefix_bytes=prefix_bytes
        )
        sizes = {"limit_bytes": budget.limit_bytes, "weights_bytes": budget.weights_bytes}
        now = self._pressure = pressure.assess(self._pressure, reading, **sizes)
        limit = budget.prefix_bytes(self._lengths.values())
        if now.prefix_cap_bytes is not None:
            limit = min(limit, now.prefix_cap_bytes)
        return MemoryAdvice(
            prefix_limit_bytes=limit,
            chunk_factor=now.chunk_factor,
            may_join=now.level is not PressureLevel.CRITICAL or not self._lengths,
            clear_buffers=pressure.should_clear_buffers(now, reading, **sizes),
        )


def _length(job: Job) -> int:
    return len(job.prompt) + job.max_tokens
