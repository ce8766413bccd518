"""What is done to logits before a token is chosen: penalties, bias, grammar. For the rows that ask for it alone.

All of it depends on the tokens made so far, so it waits for them; rows without any of it do not.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from engine.grammar.interface import GrammarMatcher, TokenMask
from engine.jobs import Job

Array: TypeAlias = Any  # mlx ships no types


class PenaltyState:
    """Which tokens of one sequence are penalised or biased, kept up token by token."""

    def __init__(self, job: Job) -> None:
        self._sampling = job.sampling
        self._slots: dict[int, int] = {}
        self._tokens = np.zeros(64, dtype=np.int32)
        # Made so often, in the prompt, bias.
        self._counts = np.zeros((3, 64), dtype=np.float32)
        for token, bias in job.sampling.logit_bias:
            slot = self._slot(token)
            self._counts[2, slot] = bias
        if job.sampling.repetition_penalty != 1:
            for token in set(job.prompt):
                slot = self._slot(token)
                self._counts[1, slot] = 1

    def add(self, token: int) -> None:
        """Count a new token."""
        slot = self._slot(token)  # may replace the arrays
        self._counts[0, slot] += 1

    @property
    def tokens(self) -> Any:
        """The tokens concerned, each once; int32."""
        return self._tokens[: len(self._slots)]

    @property
    def factors(self) -> Any:
        """By what positive logits are divided and negative ones multiplied."""
        seen = (self._counts[0] + self._counts[1])[: len(self._slots)] > 0
        return np.where(seen, np.float32(self._sampling.repetition_penalty), np.float32(1))

    @property
    def addends(self) -> Any:
        """What is added then."""
        made, _, bias = self._counts[:, : len(self._slots)]
        rules = self._sampling
        spent = rules.frequency_penalty * made + rules.presence_penalty * (made > 0)
        return (bias - spent).astype(np.float32)

    def _slot(self, token: int) -> int:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)], axis=1)
        self._tokens[slot] = token
        return slot


def needs_penalties(job: Job) -> bool:
    """Whether a job's logits change with what it has made, or by a bias."""
    rules = job.sampling
    penalties = (rules.presence_penalty, rules.frequency_penalty, rules.repetition_penalty - 1)
    return bool(rules.logit_bias) or any(penalties)


def apply_penalties(logits: Array, tallies: Sequence[tuple[int, PenaltyState]]) -> Array:
    """Return logits of shape (rows, vocabulary) with each row's penalties and biases; (row, tally) pairs."""
    filled = [(row, tally) for row, tally in tallies if len(tally.tokens)]
    if not filled:
        return logits
    rows = mx.array(np.concatenate([np.full(len(t.tokens), row) for row, t in filled]))
    columns = mx.array(np.concatenate([t.tokens for _, t in filled]))
    factors = mx.array(np.concatenate([t.factors for _, t in filled]))
    addends = mx.array(np.concatenate([t.addends for _, t in filled]))
    seen = logits[rows, columns].astype(mx.float32)
    changed = mx.where(seen > 0, seen / factors, seen * factors) + addends
    return logits.at[rows, columns].add((changed - seen).astype(logits.dtype))


def apply_grammars(logits: Array, matchers: Sequence[tuple[int, GrammarMatcher]]) -> Array:
    """Return logits with minus infinity wherever a row's grammar does not allow the token; (row, matcher) pairs."""
    if not matchers:
        return logits
    count, size = logits.shape
    bits: TokenMask = np.zeros((len(matchers), -(-size // 32)), dtype=np.uint32)
    for at, (_, matcher) in enumerate(matchers):
        matcher.fill(bits[at])
    mask = np.ones((count, size), dtype=bool)
    mask[[row for row, _ in matchers]] = np.unpackbits(
        bits.view(np.uint8), axis=-1, bitorder="little"
    )[:, :size]
    return mx.where(mx.array(mask), logits, -mx.inf)
