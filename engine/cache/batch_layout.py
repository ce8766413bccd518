"""Decides whether the rows of a batch share one padded array. Pure; no mlx.

A padded array holds every row at the length of the longest. Attention then needs one kernel a layer instead of one a
row, which pays while the rows are about equally long. Two rules keep memory and time in bounds:
- The padding is at most a fifth of the array, and the array is never larger than what its rows were promised.
- A change of layout copies all rows, so a batch must have been the same for some steps before it is padded.

Every rank of a group decides alike: only lengths and steps count.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from models.footprint import round_up

_MOST_PADDING: Final = 0.2
# A copy of all rows costs 1.5 attention passes (ADR 0083), and padding saves at most a tenth of one.
_SETTLED_STEPS: Final = 64


@dataclass(frozen=True, slots=True)
class RowLength:
    """The tokens of one row of a batch."""

    tokens: int
    """Tokens in its caches after the next step, guessed ones included."""
    promised: int
    """Tokens for which memory is reserved."""


def is_padding_cheap(rows: Sequence[RowLength]) -> bool:
    """Return whether one padded array for these rows wastes little, and fits into the memory promised to them."""
    if len(rows) < 2:
        return False
    longest = max(row.tokens for row in rows)
    padding = longest * len(rows) - sum(row.tokens for row in rows)
    if padding > _MOST_PADDING * longest * len(rows):
        return False
    return len(rows) * round_up(longest) <= sum(round_up(row.promised) for row in rows)


def should_pad(rows: Sequence[RowLength], *, steps: int) -> bool:
    """Return whether to merge rows that have been together for this many steps."""
    return steps >= _SETTLED_STEPS and is_padding_cheap(rows)
