"""Carries plans out. Every rank of a group runs one, and all do the same; only rank 0 listens to what it says.

Nothing here decides: no clock, no chance, no look at memory. The worker's thread alone.

What every rank shows of its batch: memory, sequences, and what is cached. The worker's thread alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import mlx.core as mx

from engine.batch.decode import DecodeRow, DecodeStage
from engine.batch.prefill import PrefilledPrompts, PrefillStage
from engine.batch.speculative import DraftProposer
from engine.batch.step_plan import PromptChunk, StepPlan
from engine.cache.interface import PrefixCache
from engine.gauges import Gauges
from engine.grammar.interface import GrammarCompiler
from engine.jobs import Job, TokenOutput

Model: TypeAlias = Any  # mlx ships no types


@dataclass(slots=True, kw_only=True)
class StepExecutor:
    """The jobs a rank knows of, in whichever stage they are."""

    model: Model
    ends: frozenset[int]
    """Tokens that end a text."""
    prefix: PrefixCache
    grammars: GrammarCompiler | None
    guesser: DraftProposer | None = None
    decoding: DecodeStage = field(init=False)
    prefilling: PrefillStage = field(init=False)
    jobs: dict[int, Job] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Begin with nothing."""
        self.decoding = DecodeStage(self.model, ends=self.ends, guesser=self.guesser)
        self.prefilling = PrefillStage(self.model, self.prefix)

    @property
    def kv_bytes(self) -> int:
        """What the caches of running jobs hold."""
        return self.decoding.nbytes + self.prefilling.nbytes

    def tidy(self, plan: StepPlan) -> None:
        """Give back memory that the plan says to."""
        if plan.prefix_bytes is not None:
            self.prefix.trim(plan.prefix_bytes)
        if plan.clears:
            mx.clear_cache()

    def run(self, plan: StepPlan) -> list[TokenOutput]:
        """Do all of a plan, as rank 0 does it piece by piece; return the tokens that became known."""
        self.tidy(plan)
        self.join(plan.joins)
        self.leave(plan.leaves)
        made: list[TokenOutput] = []
        if plan.decodes:
            made += self.decode(reads_on=bool(plan.chunks))
            self.expel()
        if plan.chunks:
            read, _ = self.prefill(plan.chunks)
            if read is not None:
                self.begin(read)
        return made

    def join(self, jobs: Sequence[Job]) -> None:
        """Hear of new jobs."""
        self.jobs.update({job.id: job for job in jobs})

    def leave(self, job_ids: Sequence[int]) -> None:
        """Forget jobs in whatever stage; what they had computed stays in the prefix cache."""
        for job_id in job_ids:
            self._keep(job_id)
            self.jobs.pop(job_id, None)
        self.prefilling.leave(job_ids)
        self.decoding.leave(job_ids)

    def drop(self, job_ids: Sequence[int]) -> None:
        """Forget jobs whose caches cannot be trusted. If one of them generates, all that do go with it."""
        for job_id in job_ids:
            self.jobs.pop(job_id, None)
        self.prefilling.leave(job_ids)
        if any(row.job.id in job_ids for row in self.decoding.rows):
            self.decoding = DecodeStage(self.model, ends=self.ends, guesser=self.guesser)

    def decode(self, *, reads_on: bool) -> list[TokenOutput]:
        """Start one more token for every sequence that generates; return what is known of those before.

        With `reads_on` a piece of a prompt comes next, and takes long: the tokens are waited for, and told, first.
        """
        made: list[TokenOutput] = []
        if any(row.is_last for row in self.decoding.rows):
            made = self._ended(
                self.decoding.read()
            )  # or a pass would be made for tokens nobody may have
        if self.decoding.rows:
            made += self._ended(self.decoding.step())
        if reads_on:
            made += self._ended(self.decoding.read())
        return made

    def expel(self) -> dict[int, str]:
        """Forget jobs whose grammars cannot be followed any more; return them, and why."""
        faults = {
            row.job.id: row.matcher.fault
            for row in self.decoding.rows
            if row.matcher is not None and row.matcher.fault is not None
        }
        self.leave(list(faults))
        return faults

    def prefill(self, chunks: Sequence[PromptChunk]) -> tuple[PrefilledPrompts | None, int]:
        """Read pieces of prompts; return those at their end, and how many tokens were computed."""
        return self.prefilling.read([self.jobs[chunk.job_id] for chunk in chunks], chunks)

    def begin(self, read: PrefilledPrompts) -> None:
        """Let prompts that were read to their end generate from the next step on."""
        rows = [
            DecodeRow.of(prompt.job, cached=prompt.cached, grammars=self.grammars)
            for prompt in read.prompts
        ]
        self.decoding.join(rows, read.caches)

    def _ended(self, made: list[TokenOutput]) -> list[TokenOutput]:
        ended = [one.job_id for one in made if one.finish is not None]
        if ended:
            self.leave(ended)
        return made

    def _keep(self, job_id: int) -> None:
        """Put what a sequence has computed where its continuation will look for it."""
        found = self.decoding.extract(job_id)
        if found is not None:
            self.prefix.store(*found)


# What a gateway is told of the prefix cache: the blocks used last, of 64 tokens each.
_SUMMARY_BLOCKS = 1024


def update_gauges(gauges: Gauges, executor: StepExecutor) -> None:
    """Write it into the gauges, after a step."""
    prefix = executor.prefix.stats
    gauges.active_bytes = mx.get_active_memory()
    gauges.buffer_bytes = mx.get_cache_memory()
    gauges.peak_bytes = mx.get_peak_memory()
    gauges.running = len(executor.decoding.rows)
    gauges.prefilling = len(executor.jobs) - gauges.running
    if gauges.prefix_bytes != prefix.nbytes:
        gauges.prefix_bytes = prefix.nbytes
        gauges.prefix_blocks = tuple(executor.prefix.summary(_SUMMARY_BLOCKS))
    gauges.prefix_lookups = prefix.lookups
    gauges.prefix_query_tokens = prefix.asked_tokens
    gauges.prefix_hit_tokens = prefix.hit_tokens
    gauges.prefix_evictions = prefix.evictions
