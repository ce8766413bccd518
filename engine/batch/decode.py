"""The generating sequences of a batch: one forward pass a step for all of them. Worker thread only.

The next pass starts before the tokens of the last one are read, so that the host's work overlaps with the device's.
Only rows whose choice depends on their last token (grammars, penalties) wait for it, and only with the choice, not
with the pass.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import mlx.core as mx

from engine.batch import logits_processors, logprobs
from engine.batch.hidden_states import HiddenStates
from engine.batch.logits_processors import PenaltyState, needs_penalties
from engine.batch.logprobs import BatchLogprobs
from engine.batch.sampling import SamplingColumns, sample
from engine.batch.speculative import TokenProposer, TokenSequence
from engine.cache.batch_caches import BatchCaches
from engine.cache.batch_layout import RowLength
from engine.cache.interface import LayerCache
from engine.cache.rollback import Rollback
from engine.grammar.interface import GrammarCompiler, GrammarMatcher
from engine.jobs import FinishReason, Job, TokenLogprobs, TokenOutput
from engine.model.adapter_bank import AdapterBank
from engine.vision.vision_model import VisionModel

Array: TypeAlias = Any  # mlx ships no types
Model: TypeAlias = Any

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class DecodeRow:
    """The host's state of one generating job: its tokens so far, and their effect on the next one."""

    job: Job
    cached_tokens: int
    """Number of prompt tokens that came from the prefix cache."""
    matcher: GrammarMatcher | None
    penalties: PenaltyState | None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """To report with the first token."""
    outputs: list[int] = field(default_factory=list)
    """New tokens that were read, those of `job.emitted` included."""
    chosen: int = 0
    """Number of tokens chosen on the device, read or not: the index of the next one."""
    reserved: int | None = None
    """Tokens for which its caches have memory; None: all that it may have."""

    @classmethod
    def of(
        cls,
        job: Job,
        *,
        cached_tokens: int,
        grammars: GrammarCompiler | None,
        prompt_logprobs: tuple[TokenLogprobs, ...] | None = None,
        reserved: int | None = None,
    ) -> "DecodeRow":
        """Return the row of a job whose prompt was read, with the tokens that another process made for it."""
        matcher = None
        if job.grammar is not None:
            assert grammars is not None, "a grammar is checked before its job is made"
            matcher = grammars.matcher(job.grammar)
        row = cls(
            job=job,
            cached_tokens=cached_tokens,
            matcher=matcher,
            penalties=PenaltyState(job) if needs_penalties(job) else None,
            prompt_logprobs=prompt_logprobs,
            reserved=reserved,
        )
        for token in job.emitted:
            row._append(token)
        row.chosen = len(job.emitted)
        return row

    @property
    def waits_for_tokens(self) -> bool:
        """True if the next token cannot be chosen before the last one is read."""
        return self.matcher is not None or self.penalties is not None

    @property
    def has_unread(self) -> bool:
        """True if a token was chosen and not read."""
        return self.chosen > len(self.outputs)

    @property
    def is_last(self) -> bool:
        """True if all tokens that the job may have are chosen."""
        return self.chosen >= self.job.max_tokens

    @property
    def fed(self) -> int:
        """Number of tokens in the caches: the newest one was chosen, and perhaps read, but not fed to the model."""
        return len(self.job.prompt) + self.chosen - 1

    @property
    def length(self) -> RowLength:
        """The tokens after the next step, and those for which there is memory."""
        most = len(self.job.prompt) + self.job.max_tokens
        return RowLength(self.fed + 1, most if self.reserved is None else self.reserved)

    @property
    def room(self) -> int:
        """Number of tokens that may be guessed: the job's last token is never a guess."""
        return self.job.max_tokens - self.chosen - 1

    @property
    def sequence(self) -> TokenSequence:
        """The prompt and the new tokens, without a copy."""
        return TokenSequence(self.job.id, self.job.prompt, self.outputs)

    @property
    def newest(self) -> int:
        """The last token of the prompt and the new tokens."""
        return self.outputs[-1] if self.outputs else self.job.prompt[-1]

    def read(self, token: int, scores: TokenLogprobs | None, *, is_end: bool) -> TokenOutput:
        """Read the next chosen token; `is_end` says that it ends the text."""
        self._append(token)
        finish: FinishReason | None = None
        if is_end:
            finish = "stop"
        elif len(self.outputs) >= self.job.max_tokens:
            finish = "length"
        is_first = len(self.outputs) == len(self.job.emitted) + 1
        return TokenOutput(
            job_id=self.job.id,
            token=token,
            finish=finish,
            logprobs=scores,
            cached_tokens=self.cached_tokens if is_first else 0,
            prompt_logprobs=self.prompt_logprobs if is_first else None,
        )

    def _append(self, token: int) -> None:
        self.outputs.append(token)
        if self.matcher is not None:
            self.matcher.take(token)
        if self.penalties is not None:
            self.penalties.add(token)


class DecodeStage:
    """A batch of rows, their caches, and the tokens that were chosen and not fed to the model yet."""

    def __init__(
        self,
        model: Model,
        *,
        ends: frozenset[int],
        proposer: TokenProposer | None = None,
        adapters: AdapterBank | None = None,
        vision: VisionModel | None = None,
        by_rows: bool = False,
    ) -> None:
        """`model` may be `HiddenStates` of one; `vision` is the model, if it sees images.

        `by_rows` says that its caches may be `RowsKVCache`.
        """
        self._vision = vision
        self._model = model
        self._states = model if isinstance(model, HiddenStates) else None
        self._adapters = adapters
        self._ends = ends
        self._end_tokens = sorted(ends)
        self._proposer = proposer
        self.rows: list[DecodeRow] = []
        self._caches = BatchCaches(by_rows=by_rows)
        self._tokens: Array = None  # shape (rows,): the input of the next pass
        self._sampling = SamplingColumns.of(())
        self._logprobs: BatchLogprobs | None = None
        self._guessed_job: int | None = (
            None  # the job for which tokens are guessed, as it was logged
        )

    @property
    def nbytes(self) -> int:
        """Bytes that the caches hold."""
        return self._caches.nbytes

    @property
    def is_padded(self) -> bool:
        """True if the rows share padded arrays."""
        return self._caches.is_padded

    def join(self, rows: Sequence[DecodeRow], caches: list[LayerCache]) -> None:
        """Add sequences. Their merged caches hold all tokens but the last one of each."""
        tokens = mx.array([row.newest for row in rows], dtype=mx.uint32)
        if self.rows:
            tokens = mx.concatenate([self._tokens, tokens])
        self._caches.join(caches)
        self._tokens = tokens
        self.rows = [*self.rows, *rows]
        self._sampling = SamplingColumns.of([row.job.sampling for row in self.rows])

    def extract(self, job_id: int) -> tuple[tuple[int, ...], list[LayerCache]] | None:
        """Return a job's tokens that the caches hold, and caches of this job alone; None if it does not generate."""
        for at, row in enumerate(self.rows):
            if row.job.id == job_id:
                tokens = (row.job.cache_prompt or row.job.prompt) + tuple(row.outputs)
                return tokens[: row.fed], self._caches.extract(at)
        return None

    def leave(self, job_ids: Sequence[int]) -> None:
        """Remove jobs; ignore those that do not generate."""
        removed = frozenset(job_ids)
        keep = [at for at, row in enumerate(self.rows) if row.job.id not in removed]
        if len(keep) == len(self.rows):
            return
        if self._logprobs is not None:
            self._logprobs = self._logprobs.select(keep)
        self.rows = [self.rows[at] for at in keep]
        self._sampling = SamplingColumns.of([row.job.sampling for row in self.rows])
        self._caches.keep(keep)
        self._tokens = self._tokens[mx.array(keep)] if keep else None

    def read(self) -> list[TokenOutput]:
        """Wait for the tokens that were chosen and not read, and return them."""
        if not any(row.has_unread for row in self.rows):
            return []
        tokens = self._tokens.tolist()
        scores = {} if self._logprobs is None else self._logprobs.read()
        self._logprobs = None
        return [
            row.read(token, scores.get(at), is_end=token in self._ends)
            for at, (row, token) in enumerate(zip(self.rows, tokens, strict=True))
            if row.has_unread
        ]

    def step(self) -> list[TokenOutput]:
        """Start one more token for every row; return the tokens chosen before it that were not read yet.

        The caller first removes rows that had their last token.
        """
        if self._adapters is not None:
            self._adapters.select([row.job.adapter for row in self.rows])
        if self._vision is not None:
            self._vision.select([row.job for row in self.rows])
        proposer = self._proposer
        if self._states is not None and len(self.rows) > 1:
            self._states.clear()
        self._caches.arrange([row.length for row in self.rows])
        if proposer is not None and len(self.rows) > 1:
            self._note_guesses(proposer, None)
        if proposer is not None and len(self.rows) == 1 and not self.rows[0].waits_for_tokens:
            row = self.rows[0]
            is_promising = proposer.is_promising(row.sequence, row.room)
            self._note_guesses(proposer, row if is_promising else None)
            if is_promising:
                return self._step_speculative(proposer, row)
            outputs = self._step_plain()
            proposer.note_step(0, accepted=0, passes=int(bool(outputs)))
            return outputs
        return self._step_plain()

    def _note_guesses(self, proposer: TokenProposer, row: DecodeRow | None) -> None:
        """Log when guesses begin and end to pay."""
        job_id = None if row is None else row.job.id
        if job_id == self._guessed_job or not log.isEnabledFor(logging.DEBUG):
            return
        self._guessed_job = job_id
        fields = {
            "request_id": self.rows[0].job.request_id if row is None else row.job.request_id,
            "draft_tokens": proposer.proposed_tokens,
            "draft_accepted_tokens": proposer.accepted_tokens,
        }
        log.debug("guesses begin" if row is not None else "guesses end", extra=fields)

    def _step_plain(self, again: Sequence[int] = ()) -> list[TokenOutput]:
        """Start one more token for every row; return the tokens that were not read yet.

        `again` are tokens before it that the caches of the only row have no more. Their hidden states are kept.
        """
        if self._states is not None and len(self.rows) == 1:
            self._states.keep_next(self.rows[0].job.id, self.rows[0].fed, skipped=len(again))
        tokens = self._tokens[:, None]
        if again:
            tokens = mx.concatenate([mx.array([again], dtype=tokens.dtype), tokens], axis=1)
        logits = self._model(tokens, cache=self._caches.layers)[:, -1, :]
        outputs: list[TokenOutput] = []
        if any(row.waits_for_tokens for row in self.rows):
            mx.async_eval(logits)  # type: ignore[no-untyped-call] # mlx ships few types
            outputs = self.read()
        chosen, scores = self._choose(logits)
        mx.async_eval(  # type: ignore[no-untyped-call] # mlx ships few types
            chosen, *(scores.arrays if scores is not None else ())
        )
        if not outputs:
            outputs = self.read()
        self._tokens, self._logprobs = chosen, scores
        for row in self.rows:
            row.chosen += 1
        return outputs

    def _step_speculative(self, proposer: TokenProposer, row: DecodeRow) -> list[TokenOutput]:
        """Make one token more than were guessed right, and read all of them."""
        outputs = self.read()
        if any(output.finish is not None for output in outputs):
            return outputs
        has_waited = bool(outputs)
        draft = proposer.propose(row.sequence, row.room)
        if not draft:
            return [*outputs, *self._step_plain()]
        if self._states is not None:
            self._states.keep_next(row.job.id, row.fed)
        passed = [row.newest, *draft]
        count = len(passed)
        rollback = Rollback(self._caches.layers)
        logits = self._model(mx.array([passed]), cache=self._caches.layers)[0]
        sampling = self._sampling if count == 1 else SamplingColumns.of([row.job.sampling] * count)
        too_early = [at for at in range(count) if row.chosen + at < row.job.min_tokens]
        changed = logits_processors.ban_tokens(logits, too_early, self._end_tokens)
        chosen = sample(changed, sampling, range(row.chosen, row.chosen + count))
        measured = logprobs.compute(logits, chosen, [row.job.top_logprobs] * count)
        tokens = chosen.tolist()
        scores = {} if measured is None else measured.read()
        accepted = 0
        while accepted < len(draft) and draft[accepted] == tokens[accepted]:
            accepted += 1
        made: list[TokenOutput] = []
        for at, token in enumerate(tokens[: accepted + 1]):
            made.append(row.read(token, scores.get(at), is_end=token in self._ends))
            if made[-1].finish is not None:
                break
        row.chosen = len(row.outputs)
        self._tokens = mx.array([row.newest], dtype=mx.uint32)
        if self._states is not None:
            self._states.trim(count - len(made))
        again = passed[: rollback.take_back(count, keep=len(made))]
        del rollback
        is_over = made[-1].finish is not None
        proposer.note_step(
            len(draft),
            accepted=accepted,
            passes=int(has_waited) + bool(again and not is_over),
        )
        if again and is_over:
            # Computed only if the prefix cache stores the sequence.
            self._model(mx.array([again]), cache=self._caches.layers)
        elif again:
            # The next token takes part in the pass, and is read in this step, whose time is that of the guess.
            made += [*self._step_plain(again), *self.read()]
        return [*outputs, *made]

    def _choose(self, logits: Array) -> tuple[Array, BatchLogprobs | None]:
        rows = list(enumerate(self.rows))
        changed = logits_processors.apply_penalties(
            logits, [(at, row.penalties) for at, row in rows if row.penalties is not None]
        )
        changed = logits_processors.apply_grammars(
            changed, [(at, row.matcher) for at, row in rows if row.matcher is not None]
        )
        too_early = [at for at, row in rows if row.chosen < row.job.min_tokens]
        changed = logits_processors.ban_tokens(changed, too_early, self._end_tokens)
        chosen = sample(changed, self._sampling, [row.chosen for row in self.rows])
        scores = logprobs.compute(logits, chosen, [row.job.top_logprobs for row in self.rows])
        return chosen, scores
