"""Speculative decoding: a draft model guesses tokens, the model checks them in one pass. The worker's thread alone.

A guess counts only if it is the very token the model would have chosen at that place, with the number that belongs
to it (`uniform.py`): an answer is the same with and without a draft, greedy or seeded, and only comes sooner. Used
while one sequence runs; in a batch the device is busy anyway, and rows would keep different numbers of guesses.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

from engine.batch.step_plan import LARGEST_CHUNK
from engine.cache.interface import LayerCache

Model: TypeAlias = Any  # mlx ships no types


@dataclass(slots=True, kw_only=True)
class DraftProposer:
    """A draft model, and what it has read of the sequence that runs alone."""

    model: Model
    count: int
    """How many tokens to guess at once."""
    guessed: int = 0
    """Tokens so far."""
    kept: int = 0
    """Those of them the model would have chosen."""
    _caches: list[LayerCache] = field(default_factory=list)
    _read: list[int] = field(default_factory=list)

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return at most `most` tokens that may follow these."""
        count = min(self.count, most)
        if count < 1:
            return []
        self._catch_up(tokens)
        last = mx.array([[tokens[-1]]])
        guesses: list[Any] = []
        for _ in range(count):
            last = mx.argmax(self.model(last, cache=self._caches)[:, -1, :], axis=-1, keepdims=True)
            guesses.append(last)
            mx.async_eval(last)  # type: ignore[no-untyped-call] # mlx ships few types
        found = [int(guess.item()) for guess in guesses]
        self._read += [tokens[-1], *found[:-1]]
        self.guessed += count
        return found

    def _catch_up(self, tokens: Sequence[int]) -> None:
        """Have read all of the tokens but the last one, whatever was read before."""
        wanted = list(tokens[:-1])
        known = 0
        for ours, theirs in zip(self._read, wanted, strict=False):
            if ours != theirs:
                break
            known += 1
        if known:
            trim_prompt_cache(self._caches, len(self._read) - known)
        else:
            self._caches = make_prompt_cache(self.model)
        for start in range(known, len(wanted), LARGEST_CHUNK):
            self.model(mx.array([wanted[start : start + LARGEST_CHUNK]]), cache=self._caches)
            mx.eval([cache.state for cache in self._caches])
        self._read = wanted
