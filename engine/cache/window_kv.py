"""A sliding window that keeps the first tokens of a sequence: models send much of their attention to them.

mlx-lm's RotatingKVCache has `keep`, and two things stand against using it as it is. Its mask for a piece of a prompt
lets the first tokens go with the others, so that an answer depends on the pieces. And its batches drop `keep`, so a
batch keeps these caches row by row (row_caches.py).
"""

from typing import Any, TypeAlias

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache
from typing_extensions import override

Array: TypeAlias = Any  # mlx ships no types


class KeepingKVCache(RotatingKVCache):
    """One sequence's keys and values of one layer: those of the first `keep` tokens, and of the last ones.

    Together they are `max_size` tokens at most, and a piece of a prompt while it is read.
    """

    keys: Any
    values: Any
    offset: int
    max_size: int
    keep: int

    @override
    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> Array | None:
        """Return the mask for the next `N` tokens: each sees the first tokens and its own window.

        Raises:
            TypeError: the model asks for another window.

        """
        if window_size is not None:
            raise TypeError("a window that keeps the first tokens has one size for all layers")
        if N == 1 and not return_array:
            return None  # every place holds a token that it sees
        before = min(self.max_size - 1, self.offset)
        rows = mx.arange(before, before + N)[:, None]
        columns = mx.arange(before + N)[None]
        is_near = columns > rows - (self.max_size - self.keep)
        mask: Array = (columns <= rows) & ((columns < self.keep) | is_near)
        return mask
