"""Decides whether the rows of a batch share one padded array. Pure; no mlx.

A padded array holds every row at the length of the longest. Attention then needs one kernel a layer instead of one a
row, which pays while the rows are about equally long. All costs are counted in tokens that attention reads:
- Padding is read like tokens. It is cheap up to a fifth of the array, or up to what the kernels of a row cost.
- A change of layout copies all rows. It must be paid back by the steps that a batch has been the same.
- The array is never larger than what its rows were promised.

Every rank of a group decides alike: only lengths and steps count.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from models.footprint import ROW_STEP, round_up

_MOST_PADDING: Final = 0.2
# What the kernels of one more row cost a layer, in tokens of a row: measured on two CPU cores (ADR 0016). A GPU reads a
# token in a fraction of the time and starts a kernel no faster; this was estimated, not measured.
_ROW_COST: Final = 128 if sys.platform == "linux" else 512
# Padding a batch and splitting it again copies each token twice, which costs about as much as reading it four times.
_COPY_COST: Final = 4


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
    padding = longest - sum(row.tokens for row in rows) / len(rows)
    if padding > max(_MOST_PADDING * longest, _ROW_COST):
        return False
    return round_up(longest, ROW_STEP) <= padded_slots(rows)


def padded_slots(rows: Sequence[RowLength]) -> int:
    """Return the tokens that each row of a padded array may have in the memory of all rows."""
    slots = sum(round_up(row.promised, ROW_STEP) for row in rows) // len(rows)
    return slots - slots % ROW_STEP


def should_pad(rows: Sequence[RowLength], *, steps: int) -> bool:
    """Return whether to merge rows that have been together for this many steps."""
    longest = max((row.tokens for row in rows), default=0)
    return steps * _ROW_COST >= _COPY_COST * longest and is_padding_cheap(rows)
