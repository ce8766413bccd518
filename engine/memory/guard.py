"""Who may join, and what is given up when memory runs short: what the batch asks. Deterministic; knows no mlx."""

from dataclasses import dataclass, field

from engine.jobs import Job
from engine.memory import pressure
from engine.memory.budget import MemoryBudget
from engine.memory.pressure import MemoryPressure, MemoryReading, PressureLevel


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAdvice:
    """What to do before the next step."""

    prefix_limit_bytes: int
    """Trim the prefix cache to this."""
    chunk_factor: float
    """Multiply the pieces of prompts by this; 0 asks for the smallest."""
    may_join: bool
    """Whether sequences may join at all; `Memory.may_join` says of which."""
    clear_buffers: bool
    """Give back MLX's unused buffers."""


@dataclass(slots=True, kw_only=True)
class MemoryGuard:
    """The promises made to the jobs that run, and the pressure at the last look."""

    budget: MemoryBudget
    _lengths: dict[int, int] = field(default_factory=dict)
    _pressure: MemoryPressure = field(default_factory=MemoryPressure)

    @property
    def promised_bytes(self) -> int:
        """What the jobs that run will hold at worst."""
        return self.budget.needs(self._lengths.values())

    @property
    def level(self) -> PressureLevel:
        """The pressure at the last look."""
        return self._pressure.level

    def may_join(self, *jobs: Job) -> bool:
        """Whether there is room for these jobs together, to their very ends, beside those that run.

        One alone always may: what has no room by itself was refused before it came here (`Budget.refuse`), and
        nobody would ever leave for it.
        """
        if not self._lengths and len(jobs) == 1:
            return True
        if self._lengths and self._pressure.level is PressureLevel.CRITICAL:
            return False
        return self.budget.fits([*self._lengths.values(), *map(_length, jobs)])

    def joined(self, job: Job) -> None:
        """Learn that a job runs: from the moment at which its prompt is first read."""
        self._lengths[job.id] = _length(job)

    def left(self, job_id: int) -> None:
        """Learn that a job is over, whether or not it ever ran."""
        self._lengths.pop(job_id, None)

    def look(self, active_bytes: int, buffer_bytes: int, prefix_bytes: int) -> MemoryAdvice:
        """Learn what is held now, before a step; return what is to be done first.

        Also to be asked after `joined`, for what a job is promised is taken from the prefix cache.
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
