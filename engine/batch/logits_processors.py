"""Logits processors: penalties, bias and grammar masks, for the rows that ask for them.

All of them depend on the tokens made so far, so their rows wait for the last token. Other rows do not.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from engine.grammar.interface import GrammarMatcher, TokenMask
from engine.jobs import Job

Array: TypeAlias = Any  # mlx ships no types


class PenaltyState:
    """The penalised and biased tokens of one sequence, updated token by token."""

    def __init__(self, job: Job) -> None:
        self._sampling = job.sampling
        self._slots: dict[int, int] = {}
        self._tokens = np.zeros(64, dtype=np.int32)
        # Rows: how often a token was generated, whether the prompt has it, its bias.
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
        """The affected tokens, each once; int32."""
        return self._tokens[: len(self._slots)]

    @property
    def factors(self) -> Any:
        """The factor that divides positive logits and multiplies negative ones."""
        occurs = (self._counts[0] + self._counts[1])[: len(self._slots)] > 0
        return np.where(occurs, np.float32(self._sampling.repetition_penalty), np.float32(1))

    @property
    def addends(self) -> Any:
        """The numbers that are added to the logits after that."""
        generated, _, bias = self._counts[:, : len(self._slots)]
        rules = self._sampling
        penalty = rules.frequency_penalty * generated + rules.presence_penalty * (generated > 0)
        return (bias - penalty).astype(np.float32)

    def _slot(self, token: int) -> int:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)], axis=1)
        self._tokens[slot] = token
        return slot


def needs_penalties(job: Job) -> bool:
    """Return whether a bias or the tokens generated so far change a job's logits."""
    rules = job.sampling
    penalties = (rules.presence_penalty, rules.frequency_penalty, rules.repetition_penalty - 1)
    return bool(rules.logit_bias) or any(penalties)


def apply_penalties(logits: Array, states: Sequence[tuple[int, PenaltyState]]) -> Array:
    """Return logits, shape (rows, vocabulary), with penalties and biases; `states` are (row, state) pairs."""
    filled = [(row, state) for row, state in states if len(state.tokens)]
    if not filled:
        return logits
    rows = mx.array(np.concatenate([np.full(len(s.tokens), row) for row, s in filled]))
    columns = mx.array(np.concatenate([s.tokens for _, s in filled]))
    factors = mx.array(np.concatenate([s.factors for _, s in filled]))
    addends = mx.array(np.concatenate([s.addends for _, s in filled]))
    old = logits[rows, columns].astype(mx.float32)
    new = mx.where(old > 0, old / factors, old * factors) + addends
    return logits.at[rows, columns].add((new - old).astype(logits.dtype))


def ban_tokens(logits: Array, rows: Sequence[int], tokens: Sequence[int]) -> Array:
    """Return logits, shape (rows, vocabulary), with minus infinity for some tokens of some rows."""
    if not rows or not tokens:
        return logits
    # Not in place: log probabilities are those of the model's own logits.
    return logits.at[mx.array(list(rows))[:, None], mx.array(list(tokens))].add(-mx.inf)


def apply_grammars(logits: Array, matchers: Sequence[tuple[int, GrammarMatcher]]) -> Array:
    """Return logits with minus infinity for tokens that a row's grammar forbids; `matchers` are (row, matcher) pairs."""
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
