"""The batch loop of rank 0: plans each step, executes it and reports its outputs.

A failure costs the jobs that it touched, never the process. After an exception the caches of sequences that were
computed together cannot be trusted, so these sequences are dropped. Prompts that were read separately survive.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx

from engine.batch.decision_log import DecisionLog
from engine.batch.embedder import Embedder
from engine.batch.executor import StepExecutor, update_gauges
from engine.batch.scheduler import Scheduler, StepSpeed
from engine.batch.step_plan import PromptChunk, StepPlan
from engine.errors import summarize
from engine.gauges import Gauges
from engine.jobs import EmbedJob, Job, JobFailure, SpeechJob, TokenOutput, WorkerEvent
from engine.memory import allocation
from engine.memory.guard import MemoryGuard
from machinery.clock import Clock

log = logging.getLogger(__name__)


class PeerRanks(Protocol):
    """The other ranks of a group (ranks/coordinator.py)."""

    def send_plan(self, plan: StepPlan) -> None:
        """Send a plan to all of them, before this rank executes it."""
        ...

    def add_outputs(self, outputs: Sequence[TokenOutput]) -> None:
        """Add tokens of this rank to the checksum that the other ranks compare."""
        ...

    def close(self) -> None:
        """Let the other ranks end."""
        ...


@dataclass(slots=True, kw_only=True)
class BatchLoop:
    """The jobs that run now. The caller limits their number."""

    executor: StepExecutor
    memory: MemoryGuard
    gauges: Gauges
    clock: Clock
    embedder: Embedder | None = None
    """None if the model makes no embeddings."""
    peers: PeerRanks | None = None
    """The other ranks of the group; None for a single rank."""
    speed: StepSpeed = field(default_factory=StepSpeed)
    _scheduler: Scheduler = field(init=False)
    _decisions: DecisionLog = field(init=False)
    _joins: list[Job] = field(default_factory=list)
    _leaves: list[int] = field(default_factory=list)
    _stalled_s: float = 0.0
    """Time for which prompts were read since the last decode step."""
    _has_begun: bool = False
    """True if a prompt was completed since the last decode step."""

    def __post_init__(self) -> None:
        """Create the scheduler and publish the memory limit."""
        self._scheduler = Scheduler(match=self.executor.prefix.match, memory=self.memory)
        self._decisions = DecisionLog(memory=self.memory, prefix=self.executor.prefix.stats)
        budget = self.memory.budget
        self.gauges.limit_bytes = budget.limit_bytes
        self.gauges.kv_limit_bytes = budget.kv_bytes
        self.gauges.kv_limit_tokens = budget.capacity_tokens

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to do."""
        is_embedding = self.embedder is not None and not self.embedder.is_idle
        return not (self.executor.jobs or self._joins or self._leaves or is_embedding)

    def add(self, job: Job | EmbedJob | SpeechJob) -> None:
        """Add a job at the next step."""
        if isinstance(job, Job):
            self._joins.append(job)
        elif isinstance(job, EmbedJob) and self.embedder is not None:
            self.embedder.add(job)

    def remove(self, job_id: int) -> None:
        """Remove a job before the next step, in any stage."""
        if job_id in self.executor.jobs:
            self._leaves.append(job_id)
        self._joins = [job for job in self._joins if job.id != job_id]
        if self.embedder is not None:
            self.embedder.remove(job_id)

    def step(self) -> Iterator[list[WorkerEvent]]:
        """Make at most one token per job and read a piece of a prompt; yield events as soon as they are known."""
        joins, leaves = tuple(self._joins), tuple(self._leaves)
        self._joins, self._leaves = [], []
        for job in joins:
            self._scheduler.add(job)
        for job_id in leaves:
            self._forget(job_id)
        prefix_bytes = self.executor.prefix.nbytes
        lengths = {row.job.id: row.length.tokens for row in self.executor.decode_stage.rows}
        preempts = self.memory.grow({at: n for at, n in lengths.items() if at not in leaves})
        advice = self.memory.advise(mx.get_active_memory(), mx.get_cache_memory(), prefix_bytes)
        running = sum(job_id not in leaves for job_id in lengths)
        waiting = len(self._scheduler.waiting)
        budget = self.speed.chunk_tokens(
            running=running, waiting=waiting, factor=advice.chunk_factor
        )
        self.gauges.chunk_tokens = budget
        # What is given up is not for new prompts.
        chunks = () if preempts else self._scheduler.next_chunks(budget)
        piece_s = sum(chunk.count for chunk in chunks) / self.speed.prefill_tokens_per_s
        stall_s = self.speed.stall_s(running=running, waiting=waiting)
        # A completed prompt gets its first token at once, unless a crowd waits to be read.
        has_first = self._has_begun and waiting <= running
        is_due = not chunks or has_first or self._stalled_s + piece_s > stall_s or bool(preempts)
        is_too_large = prefix_bytes > advice.prefix_limit_bytes
        plan = StepPlan(
            joins=joins,
            leaves=leaves,
            decodes=running > 0 and is_due,
            preempts=preempts,
            reserves=self.memory.take_reserves(),
            chunks=chunks,
            prefix_bytes=advice.prefix_limit_bytes if is_too_large else None,
            clears=advice.clear_buffers,
        )
        self._decisions.note_plan(plan, self._scheduler.waiting, self.executor.jobs)
        if self.peers is not None:
            self.peers.send_plan(plan)
        yield self._change(plan)
        if plan.decodes:
            yield self._decode(plan)
        if plan.chunks:
            yield self._prefill(plan.chunks)
        if self.embedder is not None and not self.embedder.is_idle:
            yield self.embedder.step(self.gauges.chunk_tokens)
        self.gauges.steps += 1
        if self.is_idle:
            # Return the buffers of finished sequences to the system while no request waits for a token.
            allocation.clear_buffers()
        gauges = self.gauges
        update_gauges(gauges, self.executor)
        self._decisions.note_prefix(self.executor.prefix.stats)
        gauges.kv_bytes = self.memory.promised_bytes
        gauges.preemptions = self.memory.preemptions
        if self.executor.proposer is not None:
            gauges.draft_tokens = self.executor.proposer.proposed_tokens
            gauges.draft_accepted_tokens = self.executor.proposer.accepted_tokens

    def close(self) -> None:
        """Release the other ranks, all jobs and the prefix cache."""
        if self.peers is not None:
            self.peers.close()
        self.executor.drop(list(self.executor.jobs))
        self.executor.prefix.close()

    def _forget(self, job_id: int) -> None:
        self._scheduler.remove(job_id)
        self.memory.release(job_id)

    def _change(self, plan: StepPlan) -> list[WorkerEvent]:
        self.executor.join(plan.joins)
        self.executor.free_memory(plan)
        try:
            self.executor.leave(plan.leaves)
            self.executor.reserve(plan.reserves)
        except Exception as error:
            # Removing a row from the caches runs on the device and can fail like a step.
            log.exception("cannot remove jobs from the batch; all generating jobs are lost")
            return self._fail_generating(error)
        return []

    def _decode(self, plan: StepPlan) -> list[WorkerEvent]:
        start_s, reads_on = self.clock.monotonic(), bool(plan.chunks)
        try:
            outputs = self.executor.decode(reads_on=reads_on, preempts=plan.preempts)
            failures = self.executor.expel_faulty()
        except Exception as error:
            # Whatever the error was, the caches of all sequences may be half written.
            log.exception("decode step failed; all generating jobs are lost")
            return self._fail_generating(error)
        seconds = self.clock.monotonic() - start_s
        self._stalled_s, self._has_begun = 0.0, False
        self.speed.record_decode(seconds)
        if self.executor.proposer is not None and not reads_on:
            self.executor.proposer.record_time(seconds)
        self.gauges.decode_seconds += seconds
        self.gauges.decode_tokens += len(outputs)
        for output in outputs:
            if output.finish is not None:
                self._forget(output.job_id)
                self._scheduler.note_cache_change()
        for failure in failures:
            self._forget(failure.job_id)
        for job_id in plan.preempts:
            if job_id in self.executor.jobs:
                self._scheduler.add_first(self.executor.jobs[job_id])
                self._scheduler.note_cache_change()
        if self.peers is not None:
            self.peers.add_outputs(outputs)
        return [*outputs, *failures]

    def _prefill(self, chunks: tuple[PromptChunk, ...]) -> list[WorkerEvent]:
        start_s = self.clock.monotonic()
        ids = [chunk.job_id for chunk in chunks]
        try:
            finished, computed = self.executor.prefill(chunks)
        except Exception as error:
            # Prompts in prefill have caches of their own, so generating jobs are not affected.
            log.exception("cannot read a prompt; its job is lost", extra={"jobs": ids})
            return self._fail(ids, error)
        try:
            if finished is not None:
                self.executor.begin(finished)
        except Exception as error:
            log.exception("cannot add a prompt to the generating jobs; all of them are lost")
            return [*self._fail(ids, error), *self._fail_generating(error)]
        seconds = self.clock.monotonic() - start_s
        if finished is not None:
            self._decisions.note_prompts(finished, seconds)
        self._stalled_s += seconds
        self._has_begun = self._has_begun or finished is not None
        pace = computed / (self.speed.prefill_tokens_per_s * seconds) if seconds > 0 else 1.0
        self.speed.record_prefill(computed, seconds)
        self.gauges.prefill_tokens += computed
        self.gauges.prefill_seconds += seconds
        self._scheduler.note_cache_change()
        for chunk in chunks:
            if not chunk.is_last:
                position = self.executor.prefill_stage.position(chunk.job_id)
                self._scheduler.set_position(chunk.job_id, position, pace)
        return []

    def _fail_generating(self, error: Exception) -> list[WorkerEvent]:
        ids = [row.job.id for row in self.executor.decode_stage.rows]
        return self._fail(ids, error)

    def _fail(self, ids: list[int], error: Exception) -> list[WorkerEvent]:
        if self.peers is not None:
            # The other ranks did not fail, or failed elsewhere: their sequences differ from now on.
            raise error
        for job_id in ids:
            self._forget(job_id)
        self.executor.drop(ids)
        self.gauges.faults += 1
        allocation.clear_buffers()
        return [JobFailure(job_id=job_id, reason=summarize(error)) for job_id in ids]
