"""How likely tokens were, for the rows that want to know."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx

from engine.jobs import TokenLogprobs

Array: TypeAlias = Any  # mlx ships no types


@dataclass(frozen=True, slots=True)
class BatchLogprobs:
    """Arrays on their way, computed beside the next step."""

    rows: tuple[int, ...]
    tops: tuple[int, ...]
    own: Array
    """Shape (rows,)."""
    tokens: Array
    logprobs: Array
    """Shape (rows, most alternatives), the likeliest first."""

    @property
    def arrays(self) -> tuple[Array, ...]:
        """What has to be evaluated."""
        return (self.own, self.tokens, self.logprobs)

    def kept(self, rows: Sequence[int]) -> "BatchLogprobs | None":
        """Return those of some rows, which are counted anew in that order."""
        now = {row: at for at, row in enumerate(rows)}
        kept = [at for at, row in enumerate(self.rows) if row in now]
        if not kept:
            return None
        index = mx.array(kept)
        return BatchLogprobs(
            rows=tuple(now[self.rows[at]] for at in kept),
            tops=tuple(self.tops[at] for at in kept),
            own=self.own[index],
            tokens=self.tokens[index],
            logprobs=self.logprobs[index],
        )

    def read(self) -> dict[int, TokenLogprobs]:
        """Wait for them, and return them by row."""
        own, tokens, logprobs = (array.tolist() for array in self.arrays)
        return {
            row: TokenLogprobs(
                logprob=own[at],
                top=tuple(zip(tokens[at][:top], logprobs[at][:top], strict=True)),
            )
            for at, (row, top) in enumerate(zip(self.rows, self.tops, strict=True))
        }


def compute(logits: Array, chosen: Array, tops: Sequence[int | None]) -> BatchLogprobs | None:
    """Return how likely the chosen tokens were by the model's own logits; None if no row wants to know.

    `logits` has shape (rows, vocabulary), `chosen` (rows,); `tops` says how many alternatives a row wants, or None.
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
