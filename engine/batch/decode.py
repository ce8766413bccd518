"""One generating sequence, as the host knows it. No mlx.

The sequences that generate: one forward pass a step for all of them. The worker's thread alone.

The next pass starts before the tokens of the last one are looked at, so that the host's work hides behind the
device's. Only rows whose choice depends on their last token (grammars, penalties) wait for it, and only with the
choice, not with the pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import mlx.core as mx

from engine.batch import logits_processors
from engine.batch.logits_processors import PenaltyState, needs_penalties
from engine.batch.logprobs import BatchLogprobs, compute
from engine.batch.sampling import SamplingColumns, sample
from engine.batch.speculative import DraftProposer
from engine.cache.interface import LayerCache
from engine.grammar.interface import GrammarCompiler, GrammarMatcher
from engine.jobs import FinishReason, Job, TokenLogprobs, TokenOutput


@dataclass(slots=True, kw_only=True, eq=False)
class DecodeRow:
    """A job that generates: its tokens so far, and what they change about the next one."""

    job: Job
    cached: int
    matcher: GrammarMatcher | None
    tally: PenaltyState | None
    made: list[int] = field(default_factory=list)
    """New tokens, those of `job.emitted` included."""
    chosen: int = 0
    """How many were chosen, read or not: the index of the next one."""

    @classmethod
    def of(cls, job: Job, *, cached: int, grammars: GrammarCompiler | None) -> "DecodeRow":
        """Return the row of a job whose prompt was read, with the tokens it had made elsewhere."""
        matcher = None
        if job.grammar is not None:
            assert grammars is not None, "a grammar is checked before its job is made"
            matcher = grammars.matcher(job.grammar)
        row = cls(
            job=job,
            cached=cached,
            matcher=matcher,
            tally=PenaltyState(job) if needs_penalties(job) else None,
        )
        for token in job.emitted:
            row._count(token)
        row.chosen = len(job.emitted)
        return row

    @property
    def waits_for_tokens(self) -> bool:
        """Whether the next token cannot be chosen before the last one is known."""
        return self.matcher is not None or self.tally is not None

    @property
    def has_unread(self) -> bool:
        """Whether a token was chosen that nobody has looked at."""
        return self.chosen > len(self.made)

    @property
    def is_last(self) -> bool:
        """Whether all tokens it may have are chosen."""
        return self.chosen >= self.job.max_tokens

    @property
    def tokens(self) -> tuple[int, ...]:
        """All that it consists of."""
        return self.job.prompt + tuple(self.made)

    def take(self, token: int, likelihood: TokenLogprobs | None, *, is_end: bool) -> TokenOutput:
        """Look at the next chosen token."""
        self._count(token)
        finish: FinishReason | None = None
        if is_end:
            finish = "stop"
        elif len(self.made) >= self.job.max_tokens:
            finish = "length"
        is_first = len(self.made) == len(self.job.emitted) + 1
        return TokenOutput(
            job_id=self.job.id,
            token=token,
            finish=finish,
            likelihood=likelihood,
            cached=self.cached if is_first else 0,
        )

    def _count(self, token: int) -> None:
        self.made.append(token)
        if self.matcher is not None:
            self.matcher.take(token)
        if self.tally is not None:
            self.tally.add(token)


Array: TypeAlias = Any  # mlx ships no types
Model: TypeAlias = Any


class DecodeStage:
    """A batch of rows, their caches, and the tokens that were chosen and not yet fed."""

    def __init__(
        self, model: Model, *, ends: frozenset[int], guesser: DraftProposer | None = None
    ) -> None:
        self._model = model
        self._ends = ends
        self._guesser = guesser
        self.rows: list[DecodeRow] = []
        self._caches: list[LayerCache] = []
        self._tokens: Array = None  # (rows,), what goes in next
        self._rules = SamplingColumns.of(())
        self._likelihoods: BatchLogprobs | None = None

    @property
    def nbytes(self) -> int:
        """What the caches hold."""
        return sum(cache.nbytes for cache in self._caches)

    def join(self, rows: Sequence[DecodeRow], caches: list[LayerCache]) -> None:
        """Add sequences, whose caches were merged, and lack the last token of each."""
        tokens = mx.array([row.tokens[-1] for row in rows], dtype=mx.uint32)
        if self.rows:
            for ours, theirs in zip(self._caches, caches, strict=True):
                ours.extend(theirs)
            tokens = mx.concatenate([self._tokens, tokens])
        else:
            self._caches = caches
        self._tokens = tokens
        self.rows = [*self.rows, *rows]
        self._rules = SamplingColumns.of([row.job.sampling for row in self.rows])

    def extract(self, job_id: int) -> tuple[tuple[int, ...], list[LayerCache]] | None:
        """Return the tokens one sequence's caches hold, and caches of it alone; None if it is not here."""
        for at, row in enumerate(self.rows):
            if row.job.id == job_id:
                # The newest token was chosen, and perhaps looked at, but not fed.
                fed = len(row.job.prompt) + row.chosen - 1
                return row.tokens[:fed], [cache.extract(at) for cache in self._caches]
        return None

    def leave(self, job_ids: Sequence[int]) -> None:
        """Take sequences out."""
        gone = frozenset(job_ids)
        keep = [at for at, row in enumerate(self.rows) if row.job.id not in gone]
        if len(keep) == len(self.rows):
            return
        if self._likelihoods is not None:
            self._likelihoods = self._likelihoods.kept(keep)
        self.rows = [self.rows[at] for at in keep]
        self._rules = SamplingColumns.of([row.job.sampling for row in self.rows])
        if not keep:
            self._caches, self._tokens = [], None
            return
        index = mx.array(keep)
        for cache in self._caches:
            cache.filter(index)
        self._tokens = self._tokens[index]

    def read(self) -> list[TokenOutput]:
        """Look at what was chosen and not yet looked at; waits for it."""
        if not any(row.has_unread for row in self.rows):
            return []
        tokens = self._tokens.tolist()
        likelihoods = {} if self._likelihoods is None else self._likelihoods.read()
        self._likelihoods = None
        return [
            row.take(token, likelihoods.get(at), is_end=token in self._ends)
            for at, (row, token) in enumerate(zip(self.rows, tokens, strict=True))
            if row.has_unread
        ]

    def step(self) -> list[TokenOutput]:
        """Start one more token for every row; return what was chosen before it, and was not looked at yet.

        Rows that had their last token are the caller's to take out before.
        """
        if self._guesser is not None and len(self.rows) == 1 and not self.rows[0].waits_for_tokens:
            return self._step_guessing(self._guesser, self.rows[0])
        logits = self._model(self._tokens[:, None], cache=self._caches)[:, -1, :]
        made: list[TokenOutput] = []
        if any(row.waits_for_tokens for row in self.rows):
            mx.async_eval(logits)  # type: ignore[no-untyped-call] # mlx ships few types
            made = self.read()
        chosen, likelihoods = self._choose(logits)
        mx.async_eval(  # type: ignore[no-untyped-call] # mlx ships few types
            chosen, *(likelihoods.arrays if likelihoods is not None else ())
        )
        if not made:
            made = self.read()
        self._tokens, self._likelihoods = chosen, likelihoods
        for row in self.rows:
            row.chosen += 1
        return made

    def _step_guessing(self, guesser: DraftProposer, row: DecodeRow) -> list[TokenOutput]:
        """Make as many tokens as the draft guessed right, and one more; all of them are looked at."""
        made = self.read()
        if any(one.finish is not None for one in made):
            return made
        guesses = guesser.guess(row.tokens, row.job.max_tokens - row.chosen - 1)
        logits = self._model(mx.array([[row.tokens[-1], *guesses]]), cache=self._caches)[0]
        count = len(guesses) + 1
        rules = self._rules if count == 1 else SamplingColumns.of([row.job.sampling] * count)
        chosen = sample(logits, rules, range(row.chosen, row.chosen + count))
        likelihoods = compute(logits, chosen, [row.job.top_logprobs] * count)
        tokens = chosen.tolist()
        known = {} if likelihoods is None else likelihoods.read()
        right = 0
        while right < len(guesses) and guesses[right] == tokens[right]:
            right += 1
        guesser.kept += right
        for cache in self._caches:
            cache.trim(len(guesses) - right)
        for at, token in enumerate(tokens[: right + 1]):
            made.append(row.take(token, known.get(at), is_end=token in self._ends))
            if made[-1].finish is not None:
                break
        row.chosen = len(row.made)
        self._tokens = mx.array([row.tokens[-1]], dtype=mx.uint32)
        return made

    def _choose(self, logits: Array) -> tuple[Array, BatchLogprobs | None]:
        rows = list(enumerate(self.rows))
        changed = logits_processors.apply_penalties(
            logits, [(at, row.tally) for at, row in rows if row.tally is not None]
        )
        changed = logits_processors.apply_grammars(
            changed, [(at, row.matcher) for at, row in rows if row.matcher is not None]
        )
        chosen = sample(changed, self._rules, [row.chosen for row in self.rows])
        return chosen, compute(logits, chosen, [row.job.top_logprobs for row in self.rows])
