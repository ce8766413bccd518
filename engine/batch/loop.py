"""Rank 0's side of continuous batching: decides every step, has it done, and tells what came of it.

A fault costs the jobs it touched, never the process: after an exception the caches of the sequences that were
computed together cannot be trusted, so they are thrown away; prompts that were read on their own are not.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx

from engine.batch.embedder import Embedder
from engine.batch.executor import StepExecutor, update_gauges
from engine.batch.scheduler import Scheduler, StepSpeed
from engine.batch.step_plan import PromptChunk, StepPlan
from engine.errors import summarize
from engine.gauges import Gauges
from engine.jobs import EmbedJob, Job, JobFailure, TokenOutput, WorkerEvent
from engine.memory.guard import MemoryGuard
from machinery.clock import Clock

log = logging.getLogger(__name__)


class PeerRanks(Protocol):
    """The other ranks of a group (ranks/coordinator.py)."""

    def tell(self, plan: StepPlan) -> None:
        """Pass on a plan, before it is done here."""
        ...

    def made(self, made: Sequence[TokenOutput]) -> None:
        """Hear what tokens became known here."""
        ...

    def close(self) -> None:
        """Let them end."""
        ...


@dataclass(slots=True, kw_only=True)
class BatchLoop:
    """The jobs that run now. The caller bounds their number."""

    executor: StepExecutor
    memory: MemoryGuard
    gauges: Gauges
    clock: Clock
    embedder: Embedder | None = None
    """None: the model makes no embeddings, and nobody asks for any."""
    others: PeerRanks | None = None
    """The other ranks of a group; None: there are none."""
    speed: StepSpeed = field(default_factory=StepSpeed)
    _scheduler: Scheduler = field(init=False)
    _joins: list[Job] = field(default_factory=list)
    _leaves: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin with nothing."""
        self._scheduler = Scheduler(match=self.executor.prefix.match, room=self.memory)
        self.gauges.limit_bytes = self.memory.budget.limit_bytes

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        is_embedding = self.embedder is not None and not self.embedder.is_idle
        return not (self.executor.jobs or self._joins or self._leaves or is_embedding)

    def add(self, job: Job | EmbedJob) -> None:
        """Let a job join at the next step."""
        if isinstance(job, Job):
            self._joins.append(job)
        elif self.embedder is not None:
            self.embedder.add(job)

    def remove(self, job_id: int) -> None:
        """Take a job out before the next step, in whichever stage it is."""
        if job_id in self.executor.jobs:
            self._leaves.append(job_id)
        self._joins = [job for job in self._joins if job.id != job_id]
        if self.embedder is not None:
            self.embedder.remove(job_id)

    def step(self) -> Iterator[list[WorkerEvent]]:
        """Make at most one token for every job and read a piece of a prompt; yield what is known as soon as it is."""
        plan = self._plan()
        if self.others is not None:
            self.others.tell(plan)
        yield self._change(plan)
        if plan.decodes:
            yield self._decode(reads_on=bool(plan.chunks))
        if plan.chunks:
            yield self._prefill(plan.chunks)
        if self.embedder is not None and not self.embedder.is_idle:
            yield self.embedder.step(self.gauges.chunk_tokens)
        self.gauges.steps += 1
        if self.is_idle:
            # Return the buffers of finished sequences to the system while nobody waits for a token.
            mx.clear_cache()
        self._measure()

    def close(self) -> None:
        """Give back what is held."""
        if self.others is not None:
            self.others.close()
        self.executor.drop(list(self.executor.jobs))
        self.executor.prefix.trim(0)

    def _plan(self) -> StepPlan:
        joins, leaves = tuple(self._joins), tuple(self._leaves)
        self._joins, self._leaves = [], []
        for job in joins:
            self._scheduler.add(job)
        for job_id in leaves:
            self._forget(job_id)
        held = self.executor.prefix.nbytes
        advice = self.memory.look(mx.get_active_memory(), mx.get_cache_memory(), held)
        running = sum(row.job.id not in leaves for row in self.executor.decoding.rows)
        budget = self.speed.chunk(
            running=running, waiting=len(self._scheduler.waiting), factor=advice.chunk_factor
        )
        self.gauges.chunk_tokens = budget
        return StepPlan(
            joins=joins,
            leaves=leaves,
            decodes=running > 0,
            chunks=self._scheduler.next(budget),
            prefix_bytes=advice.prefix_limit_bytes if held > advice.prefix_limit_bytes else None,
            clears=advice.clear_buffers,
        )

    def _forget(self, job_id: int) -> None:
        self._scheduler.remove(job_id)
        self.memory.left(job_id)

    def _change(self, plan: StepPlan) -> list[WorkerEvent]:
        self.executor.join(plan.joins)
        self.executor.tidy(plan)
        try:
            self.executor.leave(plan.leaves)
        except Exception as error:
            # Cutting a row out of the caches is work for the device, and may fail like a step.
            log.exception("jobs could not be taken out; those that generate are lost")
            return self._lose_generating(error)
        return []

    def _decode(self, *, reads_on: bool) -> list[WorkerEvent]:
        began = self.clock.monotonic()
        try:
            made = self.executor.decode(reads_on=reads_on)
            expelled = self.executor.expel()
        except Exception as error:
            # Whatever it was, the caches of all sequences may be half written.
            log.exception("a step failed; its jobs are lost")
            return self._lose_generating(error)
        seconds = self.clock.monotonic() - began
        self.speed.decoded(seconds)
        self.gauges.decode_seconds += seconds
        self.gauges.decode_tokens += len(made)
        for one in made:
            if one.finish is not None:
                self._forget(one.job_id)
                self._scheduler.stored()
        for job_id in expelled:
            self._forget(job_id)
        if self.others is not None:
            self.others.made(made)
        faults = [JobFailure(job_id=job_id, reason=why) for job_id, why in expelled.items()]
        return [*made, *faults]

    def _prefill(self, chunks: tuple[PromptChunk, ...]) -> list[WorkerEvent]:
        began = self.clock.monotonic()
        ids = [chunk.job_id for chunk in chunks]
        try:
            read, computed = self.executor.prefill(chunks)
        except Exception as error:
            # They have caches of their own: those which generate are not touched.
            log.exception("a prompt could not be read; its job is lost", extra={"jobs": ids})
            return self._lose(ids, error)
        try:
            if read is not None:
                self.executor.begin(read)
        except Exception as error:
            log.exception("a prompt could not join those that generate; all are lost")
            return [*self._lose(ids, error), *self._lose_generating(error)]
        seconds = self.clock.monotonic() - began
        self.speed.prefilled(computed, seconds)
        self.gauges.prefill_tokens += computed
        self.gauges.prefill_seconds += seconds
        self._scheduler.stored()
        for chunk in chunks:
            if not chunk.is_last:
                position = self.executor.prefilling.position(chunk.job_id)
                self._scheduler.has_read(chunk.job_id, position)
        return []

    def _lose_generating(self, error: Exception) -> list[WorkerEvent]:
        ids = [row.job.id for row in self.executor.decoding.rows]
        return self._lose(ids, error)

    def _lose(self, ids: list[int], error: Exception) -> list[WorkerEvent]:
        if self.others is not None:
            # The others have not failed, or not in the same place: they hold other sequences now.
            raise error
        for job_id in ids:
            self._forget(job_id)
        self.executor.drop(ids)
        self.gauges.faults += 1
        mx.clear_cache()
        return [JobFailure(job_id=job_id, reason=summarize(error)) for job_id in ids]

    def _measure(self) -> None:
        gauges = self.gauges
        update_gauges(gauges, self.executor)
        gauges.kv_bytes = self.memory.promised_bytes
        if self.executor.guesser is not None:
            gauges.draft_tokens = self.executor.guesser.guessed
            gauges.draft_accepted_tokens = self.executor.guesser.kept
