"""The memory guard of the batch: admits jobs, and says what to give up when memory is short. Deterministic; no mlx.

Most answers end long before their `max_tokens`. Where a batch keeps its rows apart, a job therefore gets memory for its
prompt and the next few hundred tokens, and more as it generates. If there is no more, the youngest job gives up its
memory. It waits, continues with the tokens that it has, and then gets memory for all that may follow. Where rows share
an array, jobs get all of their memory at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.jobs import Job
from engine.memory import pressure
from engine.memory.budget import MemoryBudget
from engine.memory.pressure import MemoryPressure, MemoryReading, PressureLevel
from models.footprint import CACHE_STEP

# New tokens for which a job gets memory when it joins, and how many more when it has fewer than a step left.
_FIRST_TOKENS, _MORE_TOKENS = 2 * CACHE_STEP, CACHE_STEP


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
    preemptions: int = 0
    """Jobs that gave up their memory so far."""
    _lengths: dict[int, int] = field(default_factory=dict)
    """The tokens for which each job has memory; the oldest job first."""
    _most: dict[int, int] = field(default_factory=dict)
    """The tokens that each job may have at most."""
    _preempted: set[int] = field(default_factory=set)
    """Jobs that gave up their memory, and have not ended."""
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
        return self.budget.fits([*self._lengths.values(), *map(self._first_length, jobs)])

    def reserve(self, job: Job) -> None:
        """Reserve memory for a job, from the first piece of its prompt on."""
        self._lengths[job.id] = self._first_length(job)
        self._most[job.id] = _length(job)

    def release(self, job_id: int) -> None:
        """Release the memory of a job that has ended, whether or not it ever ran."""
        self._give_up(job_id)
        self._preempted.discard(job_id)

    def grow(self, tokens: Mapping[int, int]) -> tuple[int, ...]:
        """Reserve memory for the next tokens of the generating jobs; return those that must give up theirs.

        `tokens` are the tokens that each of them has. The caller stops the returned jobs, and adds them again with what
        they have made. The oldest job is stopped only if no other one generates, and never if it is alone.
        """
        if not self.budget.footprint.by_rows:
            return ()
        for job_id, count in tokens.items():
            if job_id in self._lengths and count + CACHE_STEP > self._lengths[job_id]:
                self._lengths[job_id] = min(count + _MORE_TOKENS, self._most[job_id])
        stopped: list[int] = []
        while len(self._lengths) > 1 and not self.budget.fits(self._lengths.values()):
            generating = [job_id for job_id in self._lengths if job_id in tokens]
            if not generating:
                break
            # A job that was stopped before has all of its memory, and was not the one that needed more.
            fresh = [job_id for job_id in generating[1:] if job_id not in self._preempted]
            stopped.append((fresh or generating)[-1])
            self._give_up(stopped[-1])
            self._preempted.add(stopped[-1])
        self.preemptions += len(stopped)
        return tuple(stopped)

    def _give_up(self, job_id: int) -> None:
        self._lengths.pop(job_id, None)
        self._most.pop(job_id, None)

    def _first_length(self, job: Job) -> int:
        """Return the tokens for which a job gets memory when it joins."""
        if not self.budget.footprint.by_rows or job.id in self._preempted:
            return _length(job)
        return min(len(job.prompt) + len(job.emitted) + _FIRST_TOKENS, _length(job))

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
