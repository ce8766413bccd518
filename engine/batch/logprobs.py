"""Log probabilities of chosen tokens and their alternatives, for the rows that ask for them."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx

from engine.jobs import TokenLogprobs

Array: TypeAlias = Any  # mlx ships no types


@dataclass(frozen=True, slots=True)
class BatchLogprobs:
    """Log probabilities on the device, computed beside the next step."""

    rows: tuple[int, ...]
    """The batch rows that ask for them."""
    tops: tuple[int, ...]
    """The number of alternatives that each of these rows asks for."""
    own: Array
    """Log probabilities of the chosen tokens; shape (rows,)."""
    tokens: Array
    """The alternatives, likeliest first; shape (rows, most alternatives)."""
    logprobs: Array
    """Log probabilities of the alternatives; the same shape as `tokens`."""

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays to evaluate."""
        return (self.own, self.tokens, self.logprobs)

    def select(self, rows: Sequence[int]) -> "BatchLogprobs | None":
        """Return those of the given rows, renumbered in that order; None if there are none."""
        numbers = {row: at for at, row in enumerate(rows)}
        found = [at for at, row in enumerate(self.rows) if row in numbers]
        if not found:
            return None
        index = mx.array(found)
        return BatchLogprobs(
            rows=tuple(numbers[self.rows[at]] for at in found),
            tops=tuple(self.tops[at] for at in found),
            own=self.own[index],
            tokens=self.tokens[index],
            logprobs=self.logprobs[index],
        )

    def read(self) -> dict[int, TokenLogprobs]:
        """Wait for the arrays and return their values by row."""
        own, tokens, logprobs = (array.tolist() for array in self.arrays)
        return {
            row: TokenLogprobs(
                logprob=own[at],
                top_tokens=array("i", tokens[at][:top]),
                top_logprobs=array("f", logprobs[at][:top]),
            )
            for at, (row, top) in enumerate(zip(self.rows, self.tops, strict=True))
        }


def compute(logits: Array, chosen: Array, tops: Sequence[int | None]) -> BatchLogprobs | None:
    """Return the log probabilities of the chosen tokens by the model's own logits; None if no row asks for them.

    `logits` has shape (rows, vocabulary), `chosen` (rows,). `tops` is the number of alternatives that each row asks
    for; None asks for nothing.
    """
    rows = [(row, top) for row, top in enumerate(tops) if top is not None]
    if not rows:
        return None
    index = mx.array([row for row, _ in rows])
    wide = logits[index].astype(mx.float32)
    logprobs = wide - mx.logsumexp(wide, axis=-1, keepdims=True)
    own = mx.take_along_axis(logprobs, chosen[index][:, None].astype(mx.int32), axis=-1)[:, 0]
    most = max(1, *(top for _, top in rows))
    tokens = mx.argpartition(-logprobs, most - 1, axis=-1)[:, :most]
    values = mx.take_along_axis(logprobs, tokens, axis=-1)
    order = mx.argsort(-values, axis=-1)
    return BatchLogprobs(
        rows=tuple(row for row, _ in rows),
        tops=tuple(top for _, top in rows),
        own=own,
        tokens=mx.take_along_axis(tokens, order, axis=-1),
        logprobs=mx.take_along_axis(values, order, axis=-1),
    )
