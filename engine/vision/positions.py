"""Positions of tokens beside images: three numbers a token, and the rotation of heads by them. Worker thread only.

A row of pixels that follows another one is as near to it as a column to the next: Qwen and GLM count time, row and
column apart. Behind an image all three are equal again, and smaller than the number of tokens before them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import mlx.core as mx
import numpy as np

Array: TypeAlias = Any  # mlx ships no types
_AXES: Final = 3
"""Positions of a token: time, row and column."""


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of one image in a prompt."""

    start: int
    rows: int
    columns: int


def token_positions(length: int, spans: Sequence[Span]) -> tuple[np.ndarray[Any, Any], int]:
    """Return the positions of a prompt's tokens, of shape (3, length), and what a later token adds to its index."""
    positions = np.zeros((_AXES, length), dtype=np.int32)
    start = following = 0
    for span in spans:
        count = span.start - start
        positions[:, start : span.start] = np.arange(following, following + count)
        following += count
        start = span.start + span.rows * span.columns
        grid = np.indices((1, span.rows, span.columns)).reshape(_AXES, -1)
        positions[:, span.start : start] = grid + following
        following += max(span.rows, span.columns)
    positions[:, start:] = np.arange(following, following + length - start)
    return positions, following - start


def frequency_axes(sections: Sequence[int], *, is_interleaved: bool) -> np.ndarray[Any, Any]:
    """Return the axis of each frequency of a head: time, row or column.

    `sections` are the numbers of frequencies of each axis.
    """
    axes = np.zeros(sum(sections), dtype=np.int32)
    if is_interleaved:
        for axis in (1, 2):
            axes[axis : sections[axis] * _AXES : _AXES] = axis
        return axes
    axes[sections[0] :] = 1
    axes[sections[0] + sections[1] :] = 2
    return axes


class Rotation:
    """The rotation of one pass, as all layers apply it."""

    def __init__(
        self, rope: Any, axes: np.ndarray[Any, Any], positions: np.ndarray[Any, Any]
    ) -> None:
        """`rope` is mlx's module of a layer; `positions` have the shape (3, tokens)."""
        self._dims, self._is_traditional = rope.dims, rope.traditional
        frequencies = rope.base ** (-np.arange(0, rope.dims, 2, dtype=np.float64) / rope.dims)
        angles = positions[axes].T * frequencies * rope.scale  # (tokens, frequencies)
        self._cos = mx.array(np.cos(angles).astype(np.float32))
        self._sin = mx.array(np.sin(angles).astype(np.float32))

    def apply(self, heads: Array) -> Array:
        """Return rotated heads of shape (1, heads, tokens, numbers)."""
        turned = heads[..., : self._dims].astype(mx.float32)
        if self._is_traditional:
            first, second = turned[..., ::2], turned[..., 1::2]
        else:
            first, second = mx.split(turned, 2, axis=-1)
        pair = [first * self._cos - second * self._sin, second * self._cos + first * self._sin]
        if self._is_traditional:
            turned = mx.stack(pair, axis=-1).reshape(turned.shape)
        else:
            turned = mx.concatenate(pair, axis=-1)
        rest = heads[..., self._dims :]
        return mx.concatenate([turned.astype(heads.dtype), rest], axis=-1)
