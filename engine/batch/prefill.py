"""Prefill: reads prompts piece by piece, each into caches of its own. Worker thread only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

import mlx.core as mx

from engine.batch import logprobs
from engine.batch.hidden_states import HiddenStates
from engine.batch.step_plan import STORE_EVERY, PromptChunk
from engine.cache.batch_caches import merge_caches, set_reserved
from engine.cache.interface import LayerCache
from engine.cache.prefix_cache import BlockPrefixCache
from engine.cache.window_kv import KeepingKVCache
from engine.jobs import Job, TokenLogprobs
from engine.model.adapter_bank import AdapterBank
from engine.vision.vision_model import VisionModel
from models.footprint import MTP_KEPT_TOKENS

Model: TypeAlias = Any  # mlx ships no types

# Tokens of a prompt whose logits are in memory at once, if their log probabilities are asked for: 20 MB for a
# vocabulary of 150,000.
_SCORED_TOKENS = 32


@dataclass(slots=True, kw_only=True, eq=False)
class PrefillPrompt:
    """A prompt in progress."""

    job: Job
    caches: list[LayerCache]
    cached_tokens: int
    """Number of tokens that came from the prefix cache."""
    position: int
    """Number of tokens in the caches."""
    stored: int
    """Number of tokens that were stored in the prefix cache."""
    checkpoints: tuple[int, ...] = ()
    """Positions at which to make a checkpoint in the prefix cache, ascending."""
    scores: list[TokenLogprobs] = field(default_factory=list)
    """Log probabilities of the prompt's tokens from the second one on, if the job asks for them."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens to read before the first new one; the first decode step reads the last prompt token."""
        return (self.job.prompt + self.job.emitted)[:-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefilledPrompts:
    """Finished prompts, and their caches merged into one batch in the same order."""

    prompts: tuple[PrefillPrompt, ...]
    caches: list[LayerCache]


class PrefillStage:
    """The prompts in progress."""

    def __init__(
        self,
        model: Model,
        prefix: BlockPrefixCache,
        adapters: AdapterBank | None = None,
        vision: VisionModel | None = None,
        *,
        by_rows: bool = False,
        reserved: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """`model` may be `HiddenStates` of one; `vision` is the model, if it sees images.

        `by_rows` says that its caches may be `RowsKVCache`. `reserved` are the tokens for which the caches of a job have
        memory; the caller changes them.
        """
        self._reserved = reserved
        self._by_rows = by_rows
        self.reads_rows = by_rows
        """False to pad prompts that are read together, until they are read."""
        self._model = model
        self._states = model if isinstance(model, HiddenStates) else None
        self._vision = vision
        self._adapters = adapters
        self._prefix = prefix
        self._prompts: dict[int, PrefillPrompt] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that the caches hold."""
        return sum(cache.nbytes for prompt in self._prompts.values() for cache in prompt.caches)

    def leave(self, job_ids: Sequence[int]) -> None:
        """Remove prompts; the tokens read so far stay in the prefix cache."""
        for job_id in job_ids:
            self._prompts.pop(job_id, None)

    def read(
        self, jobs: Sequence[Job], chunks: Sequence[PromptChunk]
    ) -> tuple[PrefilledPrompts | None, int]:
        """Read one piece of each prompt; return the finished prompts and the number of computed tokens."""
        prompts = [self._find_or_open(job) for job in jobs]
        if not chunks[0].is_last:
            (prompt,) = prompts
            count = self._whole_images(prompt, chunks[0].count)
            count = min(count, len(prompt.tokens) - prompt.position)
            self._read_one(prompt, count)
            return None, count
        for prompt in prompts:
            del self._prompts[prompt.job.id]
        computed = sum(len(prompt.tokens) - prompt.position for prompt in prompts)
        for prompt in prompts:
            ahead = [at for at in prompt.checkpoints if prompt.position < at < len(prompt.tokens)]
            self._read_one(prompt, max(ahead, default=prompt.position) - prompt.position)
        is_alone = len(prompts) == 1 or any(
            isinstance(cache, KeepingKVCache) for cache in prompts[0].caches
        )
        is_alone = is_alone or any(prompt.job.images for prompt in prompts)
        for prompt in prompts:
            if is_alone or prompt.job.has_prompt_logprobs:
                self._read_one(prompt, len(prompt.tokens) - prompt.position)
        if is_alone:
            caches = merge_caches(
                [prefill_prompt.caches for prefill_prompt in prompts], by_rows=self._by_rows
            )
        else:
            caches = self._read_together(prompts)
        for prompt in prompts:
            if prompt.job.is_pinned:
                self._prefix.pin(prompt.tokens)
        return PrefilledPrompts(prompts=tuple(prompts), caches=caches), computed

    def positions(self) -> tuple[tuple[int, int], ...]:
        """Return the id of each job whose prompt is in progress, and how many tokens of it are in its caches."""
        return tuple((job_id, prompt.position) for job_id, prompt in self._prompts.items())

    def position(self, job_id: int) -> int:
        """Return how many tokens of a prompt are in its caches."""
        return self._prompts[job_id].position

    def _find_or_open(self, job: Job) -> PrefillPrompt:
        prompt = self._prompts.get(job.id)
        if prompt is None:
            # Logits of cached tokens are not kept.
            wanted, salt = () if job.has_prompt_logprobs else job.cache_tokens, job.cache_salt
            caches, cached_tokens = self._prefix.fetch(wanted, salt)
            set_reserved(caches, self._reserved.get(job.id))
            prompt = PrefillPrompt(
                job=job,
                caches=caches,
                cached_tokens=cached_tokens,
                position=cached_tokens,
                stored=cached_tokens,
                checkpoints=self._prefix.plan_checkpoints(
                    wanted, salt, start=cached_tokens, shared=job.system_tokens
                ),
            )
            self._prompts[job.id] = prompt
        return prompt

    def _read_one(self, prompt: PrefillPrompt, count: int) -> None:
        """Read `count` tokens, and store what others may continue."""
        end = prompt.position + count
        while prompt.position < end:
            self._read_piece(prompt, self._next_stop(prompt, end) - prompt.position)
            is_checkpoint = prompt.position in (*prompt.checkpoints, len(prompt.tokens))
            if is_checkpoint or prompt.position - prompt.stored >= STORE_EVERY:
                self._prefix.store(
                    prompt.job.cache_tokens[: prompt.position],
                    prompt.caches,
                    prompt.job.cache_salt,
                    is_checkpoint=is_checkpoint,
                )
                prompt.stored = prompt.position

    def _next_stop(self, prompt: PrefillPrompt, end: int) -> int:
        """Return the next checkpoint before `end` that cuts no image, or `end`."""
        at = prompt.position
        for stop in prompt.checkpoints:
            if at < stop < end and self._whole_images(prompt, stop - at) == stop - at:
                return stop
        return end

    def _read_piece(self, prompt: PrefillPrompt, count: int) -> None:
        self._select([prompt])
        if prompt.job.has_prompt_logprobs:
            self._read_scored(prompt, count)
        else:
            piece = prompt.tokens[prompt.position : prompt.position + count]
            states = self._states if self._keeps_states(prompt, count) else None
            self._model(mx.array([piece]), cache=prompt.caches)
            mx.eval([cache.state for cache in prompt.caches], states.newest if states else [])
            prompt.position += count

    def _whole_images(self, prompt: PrefillPrompt, count: int) -> int:
        """Return `count`, or more tokens if an image must not be cut there."""
        if self._vision is None:
            return count
        return self._vision.whole_images(prompt.job, prompt.position, count)

    def _keeps_states(self, prompt: PrefillPrompt, count: int) -> bool:
        """Keep the hidden states of the next pass if it reads the end of the prompt; return whether they are kept."""
        is_end = prompt.position + count > len(prompt.tokens) - MTP_KEPT_TOKENS
        if self._states is None or not is_end:
            return False
        return self._states.keep_next_prompt(prompt.job.id, prompt.position)

    def _select(self, prompts: Sequence[PrefillPrompt]) -> None:
        if self._adapters is not None:
            self._adapters.select([prompt.job.adapter for prompt in prompts])
        if self._vision is not None:
            self._vision.select(
                [prompt.job for prompt in prompts], [prompt.position for prompt in prompts]
            )

    def _read_scored(self, prompt: PrefillPrompt, count: int) -> None:
        """Read `count` tokens, and keep the log probabilities of the tokens that follow each of them."""
        end = prompt.position + count
        while prompt.position < end:
            self._select([prompt])
            count = self._whole_images(prompt, _SCORED_TOKENS)
            start, stop = prompt.position, min(prompt.position + count, end)
            logits = self._model(mx.array([prompt.tokens[start:stop]]), cache=prompt.caches)[0]
            following = prompt.job.prompt[start + 1 : stop + 1]
            measured = logprobs.compute(
                logits, mx.array(following), [prompt.job.top_logprobs] * len(following)
            )
            mx.eval([cache.state for cache in prompt.caches])
            if measured is not None:
                prompt.scores += measured.read().values()
            prompt.position = stop

    def _read_together(self, prompts: Sequence[PrefillPrompt]) -> list[LayerCache]:
        """Finish several prompts at once, padded on the right to the longest remainder."""
        _level_remainders(prompts)
        self._select(prompts)
        caches = merge_caches([prompt.caches for prompt in prompts], by_rows=self.reads_rows)
        pieces = [prompt.tokens[prompt.position :] for prompt in prompts]
        lengths = [len(piece) for piece in pieces]
        longest = max(lengths)
        if longest:
            padding = [longest - length for length in lengths]
            if any(padding):
                for cache in caches:
                    cache.prepare(lengths=lengths, right_padding=padding)
            rows = [[*piece, *([0] * pad)] for piece, pad in zip(pieces, padding, strict=True)]
            self._model(mx.array(rows), cache=caches)
            if any(padding):
                for cache in caches:
                    cache.finalize()
            mx.eval([cache.state for cache in caches])
        for at, prompt in enumerate(prompts):
            prompt.position = len(prompt.tokens)
            # The extra token is never part of a match. Extracting copies, so store only new tokens.
            salt = prompt.job.cache_salt
            if self._prefix.match((*prompt.tokens, 0), salt) < len(prompt.tokens):
                self._prefix.store(prompt.tokens, [cache.extract(at) for cache in caches], salt)
        return caches


def _level_remainders(prompts: Sequence[PrefillPrompt]) -> None:
    """Extend short remainders by cached tokens, to be read again, until all remainders are equally long.

    This costs as much as padding, and saves the copies of all caches with which mlx-lm moves padding to the left.
    """
    longest = max(len(prompt.tokens) - prompt.position for prompt in prompts)
    for prompt in prompts:
        excess = longest - (len(prompt.tokens) - prompt.position)
        if not 0 < excess <= prompt.cached_tokens:
            continue
        if all(cache.is_trimmable() for cache in prompt.caches):
            for cache in prompt.caches:
                cache.trim(excess)
            prompt.position -= excess
            prompt.cached_tokens -= excess
