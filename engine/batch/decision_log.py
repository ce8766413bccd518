"""Logs what the batch decides about requests, on the level debug. It decides nothing itself.

Without the level, a step costs one look at it.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.batch.prefill import PrefilledPrompts
from engine.batch.scheduler import QueuedPrompt
from engine.batch.step_plan import StepPlan
from engine.cache.interface import PrefixCacheStats
from engine.jobs import Job
from engine.memory.guard import MemoryGuard
from engine.memory.pressure import PressureLevel

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class DecisionLog:
    """Remembers what was logged, so that a decision that stands for many steps is one line."""

    memory: MemoryGuard
    prefix: PrefixCacheStats
    """Statistics of the prefix cache after the last step."""
    _waiting: int | None = None
    """The job that waits for memory."""
    _level: PressureLevel = PressureLevel.NORMAL

    def note_plan(
        self, plan: StepPlan, waiting: Sequence[QueuedPrompt], jobs: Mapping[int, Job]
    ) -> None:
        """Log a plan: which request waits for memory or gives it up, and what the prefix cache gives up."""
        if not log.isEnabledFor(logging.DEBUG):
            return
        memory = self._memory()
        for job_id in plan.preempts:
            log.debug("request gives up its memory to others", extra=_of(jobs[job_id]) | memory)
        first = next((prompt.job for prompt in waiting if not prompt.is_open), None)
        if first is None or self.memory.may_join(first):
            self._waiting = None
        elif self._waiting != first.id:
            self._waiting = first.id
            log.debug("request waits for memory", extra=_of(first) | memory)
        if plan.prefix_bytes is not None:
            fields = {"limit_bytes": plan.prefix_bytes, **memory}
            log.debug("prefix cache makes room for requests", extra=fields)
        if self.memory.level is not self._level:
            self._level = self.memory.level
            log.debug("memory pressure has changed", extra={"pressure": self._level.name, **memory})

    def note_prompts(self, finished: PrefilledPrompts, seconds: float) -> None:
        """Log the prompts that begin to generate, and what the prefix cache had of them."""
        if not log.isEnabledFor(logging.DEBUG):
            return
        for prompt in finished.prompts:
            fields = _of(prompt.job) | self._memory()
            fields |= {"cached_tokens": prompt.cached_tokens, "seconds": round(seconds, 4)}
            fields |= {"completion_tokens": len(prompt.job.emitted)}
            log.debug("request begins to generate", extra=fields)

    def note_prefix(self, stats: PrefixCacheStats) -> None:
        """Log what a step changed in the prefix cache and on its disk."""
        if not log.isEnabledFor(logging.DEBUG):
            return
        before, self.prefix = self.prefix, stats
        if stats.lookups != before.lookups:
            found = stats.hit_tokens - before.hit_tokens
            fields = {"tokens": stats.asked_tokens - before.asked_tokens, "cached_tokens": found}
            log.debug("prefix found" if found else "prefix not found", extra=fields)
        if stats.evictions != before.evictions:
            fields = {"blocks": stats.evictions - before.evictions, "bytes": stats.nbytes}
            log.debug("prefix blocks evicted", extra=fields)

    def _memory(self) -> dict[str, object]:
        budget = self.memory.budget
        return {"promised_bytes": self.memory.promised_bytes, "kv_bytes": budget.kv_bytes}


def _of(job: Job) -> dict[str, object]:
    return {"request_id": job.request_id, "prompt_tokens": len(job.prompt)}
