"""The memory guard of the batch: admits jobs, and says what to give up when memory is short. Deterministic; no mlx.

Most answers end long before their `max_tokens`. Where a batch keeps its rows apart, a job therefore gets memory for its
prompt and a few tokens, and more as it generates. If there is no more, the youngest job gives up its memory. It waits,
continues with the tokens that it has, and then gets memory for all that may follow. Where rows share an array, jobs get
all of their memory at once.

A row is copied each time that it gets more memory, so it gets much while there is plenty, and little once others may
need it. What no job has can serve any of them, so a job joins only if every one could then still grow a little.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.jobs import Job
from engine.memory import pressure
from engine.memory.budget import MemoryBudget
from engine.memory.pressure import MemoryPressure, MemoryReading, PressureLevel
from models.footprint import CACHE_STEP, ROW_STEP, round_up

# Tokens for which a job gets memory in advance while at most this share of the memory is given away.
_AHEAD_TOKENS, _AHEAD_SHARE = CACHE_STEP, 0.5
# Tokens that are kept free for each running job when another one joins (ADR 0016).
_KEPT_TOKENS = 2 * ROW_STEP


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
    _changed: dict[int, int] = field(default_factory=dict)
    """The jobs whose memory has changed since `take_reserves`, and what they have now."""
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
        """Return whether there is room for these jobs together, beside the running ones.

        Where memory is given by rows, there must also be room for the next tokens of all of them.
        A single job may always join an empty batch: `MemoryBudget.refuse` has refused jobs that do not fit alone, and
        waiting would not free any memory.
        """
        if not self._lengths and len(jobs) == 1:
            return True
        if self._lengths and self._pressure.level is PressureLevel.CRITICAL:
            return False
        kept = _KEPT_TOKENS if self.budget.footprint.by_rows else 0
        running = [min(n + kept, self._most[job_id]) for job_id, n in self._lengths.items()]
        new = [min(self._first_length(job) + kept, _length(job)) for job in jobs]
        return self.budget.fits([*running, *new])

    def reserve(self, job: Job) -> None:
        """Reserve memory for a job, from the first piece of its prompt on."""
        length = self._first_length(job)
        self._most[job.id] = _length(job)
        if self.budget.footprint.by_rows and job.id not in self._preempted:
            length = self._extend(job.id, length)
        self._set(job.id, length)

    def take_reserves(self) -> tuple[tuple[int, int], ...]:
        """Return the jobs whose memory has changed, and the tokens that their caches may have, guesses included.

        Where rows share an array there is nothing to tell: each has all of its memory from the start.
        """
        changed, self._changed = self._changed, {}
        if not self.budget.footprint.by_rows:
            return ()
        guesses = self.budget.load.draft_tokens
        return tuple((job_id, length + guesses) for job_id, length in changed.items())

    def release(self, job_id: int) -> None:
        """Release the memory of a job that has ended, whether or not it ever ran."""
        self._give_up(job_id)
        self._preempted.discard(job_id)

    def grow(self, tokens: Mapping[int, int]) -> tuple[int, ...]:
        """Reserve memory for the next tokens of the generating jobs; return those that must give up theirs.

        `tokens` are the tokens that each of them has after the next step, without guesses. The caller stops the returned
        jobs, and adds them again with what they have made. The oldest job is stopped only if no other one generates, and
        never if it is alone.
        """
        if not self.budget.footprint.by_rows:
            return ()
        for job_id, count in tokens.items():
            if count > self._lengths.get(job_id, count):
                self._set(job_id, self._extend(job_id, count))
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
        self._changed.pop(job_id, None)

    def _set(self, job_id: int, length: int) -> None:
        self._lengths[job_id] = self._changed[job_id] = length

    def _extend(self, job_id: int, tokens: int) -> int:
        """Return the tokens for which to reserve memory for a job that must have `tokens`."""
        most = self._most[job_id]
        beside = [length for other, length in self._lengths.items() if other != job_id]
        ahead = self._whole(tokens + _AHEAD_TOKENS, most)
        share = _AHEAD_SHARE if beside else 1.0
        if self.budget.needs([*beside, ahead]) <= share * self.budget.kv_bytes:
            return ahead
        return self._whole(tokens, most)

    def _whole(self, tokens: int, most: int) -> int:
        """Return the most tokens that take no more memory than `tokens` do, at most `most`."""
        guesses = self.budget.load.draft_tokens
        return min(round_up(tokens + guesses, ROW_STEP) - guesses, most)

    def _first_length(self, job: Job) -> int:
        """Return the least tokens for which a job has memory when it joins."""
        if not self.budget.footprint.by_rows or job.id in self._preempted:
            return _length(job)
        return self._whole(len(job.prompt) + len(job.emitted), _length(job))

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
