"""Executes step plans. Every rank of a group runs one executor, and all of them do the same work.

The executor decides nothing: it uses no clock, no randomness and no memory readings. Only rank 0 uses its outputs.
Worker thread only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from engine.batch.decode import DecodeRow, DecodeStage
from engine.batch.hidden_states import HiddenStates
from engine.batch.prefill import PrefilledPrompts, PrefillStage
from engine.batch.speculative import TokenProposer
from engine.batch.step_plan import PromptChunk, StepPlan
from engine.cache.prefix_cache import BlockPrefixCache
from engine.gauges import Gauges
from engine.grammar.background import BackgroundGrammars
from engine.grammar.interface import GrammarCompiler
from engine.jobs import Job, JobFailure, TokenOutput
from engine.memory import allocation
from engine.model.adapter_bank import AdapterBank
from engine.vision.vision_model import VisionModel

Model: TypeAlias = Any  # mlx ships no types

# The most prefix cache blocks that the engine reports to a gateway: the last used ones, of 64 tokens each.
_SUMMARY_BLOCKS = 1024


@dataclass(slots=True, kw_only=True)
class StepExecutor:
    """The jobs of one rank, in any stage."""

    model: Model
    ends: frozenset[int]
    """Tokens that end a text."""
    prefix: BlockPrefixCache
    grammars: GrammarCompiler | None
    proposer: TokenProposer | None = None
    adapters: AdapterBank | None = None
    vision: VisionModel | None = None
    """The model, if it sees images."""
    by_rows: bool = False
    """True if the model's caches may be kept row by row (cache/row_caches.py)."""
    reads_rows: bool = False
    """True if prompts may be read together into such caches."""
    compiling: BackgroundGrammars = field(init=False)
    decode_stage: DecodeStage = field(init=False)
    prefill_stage: PrefillStage = field(init=False)
    jobs: dict[int, Job] = field(default_factory=dict)
    _reserved: dict[int, int] = field(default_factory=dict)
    """The tokens for which the caches of each job have memory; empty if memory is not given by rows."""
    _preempted: set[int] = field(default_factory=set)
    """Jobs that were stopped once; what was cached of their prompts is reported already."""

    def __post_init__(self) -> None:
        """Create empty stages."""
        self.compiling = BackgroundGrammars(self.grammars)
        self.decode_stage = self._new_decode_stage()
        self.prefill_stage = PrefillStage(
            self.model,
            self.prefix,
            self.adapters,
            self.vision,
            by_rows=self.by_rows,
            reserved=self._reserved,
        )
        self.prefill_stage.reads_rows = self.reads_rows

    @property
    def kv_bytes(self) -> int:
        """Bytes that the caches of running jobs hold."""
        return self.decode_stage.nbytes + self.prefill_stage.nbytes

    def prompt_positions(self) -> tuple[tuple[int, int], ...]:
        """Return the id of each job whose prompt is begun, and how many tokens of it are read."""
        read = ((row.job.id, len(row.job.prompt)) for row in self.decode_stage.rows)
        return (*self.prefill_stage.positions(), *read)

    def free_memory(self, plan: StepPlan) -> None:
        """Free the memory that the plan gives up."""
        if plan.prefix_bytes is not None:
            self.prefix.trim(plan.prefix_bytes)
        if plan.clears:
            allocation.clear_buffers()

    def run(self, plan: StepPlan) -> list[TokenOutput]:
        """Execute a whole plan, in the order in which rank 0 executes its parts; return the new known tokens."""
        self.free_memory(plan)
        self.join(plan.joins)
        self.leave(plan.leaves)
        self.reserve(plan.reserves)
        outputs: list[TokenOutput] = []
        if plan.decodes:
            outputs += self.decode(reads_on=bool(plan.chunks), preempts=plan.preempts)
            self.expel_faulty()
        if plan.chunks:
            finished, _ = self.prefill(plan.chunks)
            if finished is not None:
                self.begin(finished)
        return outputs

    def join(self, jobs: Sequence[Job]) -> None:
        """Add new jobs."""
        self.jobs.update({job.id: job for job in jobs})
        for job in jobs:
            self.compiling.start(job.id, job.grammar)

    def leave(self, job_ids: Sequence[int]) -> None:
        """Remove jobs in any stage; their computed tokens stay in the prefix cache."""
        for job_id in job_ids:
            self._store_prefix(job_id)
            self.jobs.pop(job_id, None)
        self.prefill_stage.leave(job_ids)
        self.decode_stage.leave(job_ids)
        self._forget(job_ids)

    def reserve(self, reserves: Sequence[tuple[int, int]]) -> None:
        """Let the caches of jobs grow up to these numbers of tokens."""
        self._reserved.update(reserves)
        if reserves:
            for row in self.decode_stage.rows:
                row.reserved = self._reserved.get(row.job.id)

    def drop(self, job_ids: Sequence[int]) -> None:
        """Remove jobs whose caches cannot be trusted. If one of them generates, drop all generating rows."""
        for job_id in job_ids:
            self.jobs.pop(job_id, None)
        self.prefill_stage.leave(job_ids)
        self._forget(job_ids)
        if any(row.job.id in job_ids for row in self.decode_stage.rows):
            self.decode_stage = self._new_decode_stage()

    def _preempt(self, job_ids: Sequence[int]) -> None:
        """Stop generating jobs; what they computed goes to the prefix cache, as far as it has room."""
        made = {row.job.id: tuple(row.outputs) for row in self.decode_stage.rows}
        for job_id in job_ids:
            self._store_prefix(job_id)
            # What is reported with the first token was reported.
            job = replace(self.jobs[job_id], emitted=made[job_id], has_prompt_logprobs=False)
            self.jobs[job_id] = job
            self._preempted.add(job_id)
            self.compiling.start(job_id, job.grammar)
        self.decode_stage.leave(job_ids)

    def _forget(self, job_ids: Sequence[int]) -> None:
        """Free what is held for jobs beside their caches."""
        self.compiling.drop(job_ids)
        if isinstance(self.model, HiddenStates):
            self.model.forget(job_ids)
        self._preempted.difference_update(job_ids)
        for job_id in job_ids:
            self._reserved.pop(job_id, None)
        if self.vision is not None:
            self.vision.forget(job_ids)

    def decode(self, *, reads_on: bool, preempts: Sequence[int] = ()) -> list[TokenOutput]:
        """Start one more token for every generating sequence; return the tokens known by now.

        With `reads_on` a piece of a prompt follows, which takes long: wait for the new tokens first. Jobs of `preempts`
        are stopped before; their values in `jobs` then continue them.
        """
        outputs: list[TokenOutput] = []
        if preempts or any(row.is_last for row in self.decode_stage.rows):
            # Otherwise the model would compute tokens beyond a job's limit, or lose those of a job that is stopped.
            outputs = self._remove_finished(self.decode_stage.read())
            self._preempt([job_id for job_id in preempts if job_id in self.jobs])
        if self.decode_stage.rows:
            outputs += self._remove_finished(self.decode_stage.step())
        if reads_on:
            outputs += self._remove_finished(self.decode_stage.read())
        return outputs

    def expel_faulty(self) -> list[JobFailure]:
        """Remove and return the jobs whose grammar cannot be followed any further."""
        failures = [
            JobFailure(
                job_id=row.job.id,
                reason=fault.reason,
                param=row.job.grammar_param if fault.is_costly else None,
            )
            for row in self.decode_stage.rows
            if row.matcher is not None and (fault := row.matcher.fault) is not None
        ]
        self.leave([failure.job_id for failure in failures])
        return failures

    def prefill(self, chunks: Sequence[PromptChunk]) -> tuple[PrefilledPrompts | None, int]:
        """Read pieces of prompts; return the finished prompts and the number of computed tokens."""
        return self.prefill_stage.read([self.jobs[chunk.job_id] for chunk in chunks], chunks)

    def begin(self, finished: PrefilledPrompts) -> None:
        """Start to generate from finished prompts at the next step."""
        for prompt in finished.prompts:
            self.compiling.finish(prompt.job.id)
        rows = [
            DecodeRow.of(
                prompt.job,
                cached_tokens=0 if prompt.job.id in self._preempted else prompt.cached_tokens,
                prompt_logprobs=tuple(prompt.scores) if prompt.job.has_prompt_logprobs else None,
                grammars=self.grammars,
                reserved=self._reserved.get(prompt.job.id),
            )
            for prompt in finished.prompts
        ]
        self.decode_stage.join(rows, finished.caches)

    def _new_decode_stage(self) -> DecodeStage:
        return DecodeStage(
            self.model,
            ends=self.ends,
            proposer=self.proposer,
            adapters=self.adapters,
            vision=self.vision,
            by_rows=self.by_rows,
        )

    def _remove_finished(self, outputs: list[TokenOutput]) -> list[TokenOutput]:
        finished = [output.job_id for output in outputs if output.finish is not None]
        if finished:
            self.leave(finished)
        return outputs

    def _store_prefix(self, job_id: int) -> None:
        """Store what a sequence computed where its continuation will look it up."""
        found = self.decode_stage.extract(job_id)
        if found is not None:
            self.prefix.store(*found, self.jobs[job_id].cache_salt)


def update_gauges(gauges: Gauges, executor: StepExecutor) -> None:
    """Write memory, sequence counts and prefix cache statistics into the gauges, after a step."""
    prefix = executor.prefix.stats
    allocation.read_memory(gauges)
    gauges.running = len(executor.decode_stage.rows)
    gauges.prefilling = len(executor.jobs) - gauges.running
    gauges.prompt_positions = executor.prompt_positions()
    if gauges.prefix_bytes != prefix.nbytes:
        gauges.prefix_bytes = prefix.nbytes
        gauges.prefix_blocks = tuple(executor.prefix.summary(_SUMMARY_BLOCKS))
    gauges.prefix_pinned_tokens = prefix.pinned_tokens
    gauges.prefix_lookups = prefix.lookups
    gauges.prefix_query_tokens = prefix.asked_tokens
    gauges.prefix_hit_tokens = prefix.hit_tokens
    gauges.prefix_evictions = prefix.evictions
    gauges.prefix_disk_written = prefix.disk.written
    gauges.prefix_disk_read = prefix.disk.read
    gauges.prefix_disk_dropped = prefix.disk.dropped
    gauges.prefix_disk_damaged = prefix.disk.damaged
    gauges.prefix_disk_evicted = prefix.disk.evicted
    gauges.prefix_disk_bytes = prefix.disk.nbytes
