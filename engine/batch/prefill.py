"""Reading prompts, a piece at a time, each into caches of its own. The worker's thread alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx

from engine.batch.step_plan import PromptChunk
from engine.cache.interface import LayerCache, PrefixCache
from engine.jobs import Job

Model: TypeAlias = Any  # mlx ships no types

# While a prompt is read it is stored now and then, for those who wait for the same beginning. Not after every small
# piece: a recurrent layer's state is copied whole each time.
_STORE_EVERY = 512


@dataclass(slots=True, kw_only=True, eq=False)
class PrefillPrompt:
    """A prompt that is being read."""

    job: Job
    caches: list[LayerCache]
    cached: int
    """Tokens that came from the prefix cache."""
    position: int
    """Tokens that are in the caches."""
    stored: int
    """Tokens that the prefix cache has, or had."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """All that is read before the first new token; the last one goes through the first decode step."""
        return (self.job.prompt + self.job.emitted)[:-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefilledPrompts:
    """Prompts that were read to their end, and their caches merged into a batch of that order."""

    prompts: tuple[PrefillPrompt, ...]
    caches: list[LayerCache]


class PrefillStage:
    """The prompts that were begun and not ended."""

    def __init__(self, model: Model, prefix: PrefixCache) -> None:
        self._model = model
        self._prefix = prefix
        self._prompts: dict[int, PrefillPrompt] = {}

    @property
    def nbytes(self) -> int:
        """What the caches hold."""
        return sum(cache.nbytes for prompt in self._prompts.values() for cache in prompt.caches)

    def leave(self, job_ids: Sequence[int]) -> None:
        """Forget prompts; what was read of them stays in the prefix cache."""
        for job_id in job_ids:
            self._prompts.pop(job_id, None)

    def read(
        self, jobs: Sequence[Job], chunks: Sequence[PromptChunk]
    ) -> tuple[PrefilledPrompts | None, int]:
        """Read one piece of each prompt; return those that are at their end, and how many tokens were computed."""
        prompts = [self._prompt(job) for job in jobs]
        if not chunks[0].is_last:
            (prompt,) = prompts
            count = min(chunks[0].count, len(prompt.tokens) - prompt.position)
            self._one(prompt, count)
            return None, count
        for prompt in prompts:
            del self._prompts[prompt.job.id]
        computed = sum(len(prompt.tokens) - prompt.position for prompt in prompts)
        if len(prompts) == 1:
            self._one(prompts[0], computed)
            caches = merge_caches([prompts[0].caches])
        else:
            caches = self._several(prompts)
        return PrefilledPrompts(prompts=tuple(prompts), caches=caches), computed

    def position(self, job_id: int) -> int:
        """Return how much of a prompt is in its caches."""
        return self._prompts[job_id].position

    def _prompt(self, job: Job) -> PrefillPrompt:
        found = self._prompts.get(job.id)
        if found is None:
            caches, cached = self._prefix.fetch(job.prompt + job.emitted)
            found = PrefillPrompt(
                job=job, caches=caches, cached=cached, position=cached, stored=cached
            )
            self._prompts[job.id] = found
        return found

    def _one(self, prompt: PrefillPrompt, count: int) -> None:
        if not count:
            return
        piece = prompt.tokens[prompt.position : prompt.position + count]
        self._model(mx.array([piece]), cache=prompt.caches)
        mx.eval([cache.state for cache in prompt.caches])
        prompt.position += count
        is_done = prompt.position == len(prompt.tokens)
        if is_done or prompt.position - prompt.stored >= _STORE_EVERY:
            self._prefix.store(prompt.tokens[: prompt.position], prompt.caches)
            prompt.stored = prompt.position

    def _several(self, prompts: Sequence[PrefillPrompt]) -> list[LayerCache]:
        """Read several prompts to their ends at once, padded on the right to the longest remainder."""
        _level_remainders(prompts)
        caches = merge_caches([prompt.caches for prompt in prompts])
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
            # One more token, which no match ever includes. Extracting copies, so only what is new.
            if self._prefix.match((*prompt.tokens, 0)) < len(prompt.tokens):
                self._prefix.store(prompt.tokens, [cache.extract(at) for cache in caches])
        return caches


def _level_remainders(prompts: Sequence[PrefillPrompt]) -> None:
    """Give short remainders some of what the prefix cache had, to read again, until all are equally long.

    It costs what padding would, and spares the copies of all caches by which mlx-lm moves padding to the left.
    """
    longest = max(len(prompt.tokens) - prompt.position for prompt in prompts)
    for prompt in prompts:
        excess = longest - (len(prompt.tokens) - prompt.position)
        if not 0 < excess <= prompt.cached:
            continue
        if all(cache.is_trimmable() for cache in prompt.caches):
            for cache in prompt.caches:
                cache.trim(excess)
            prompt.position -= excess
            prompt.cached -= excess


def merge_caches(caches: Sequence[Sequence[LayerCache]]) -> list[LayerCache]:
    """Return one batch of several sequences' caches."""
    return [layer[0].merge(list(layer)) for layer in zip(*caches, strict=True)]
