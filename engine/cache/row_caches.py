"""Caches of a batch that keep each row by itself: a row joins and leaves without a copy, and none is padded.

mlx-lm's models hand what `update_and_fetch` returns to `scaled_dot_product_attention` of mlx_lm.models.base. For a
cache with `bits`, that function calls `quantized_scaled_dot_product_attention` by its name in that module. This is the
only place where a cache decides about attention, so `RowsKVCache` has `bits`, and `hook_attention` replaces the name
there. mlx-vlm's module does the same. No model's own module is touched.

Models that use keys and values in another way (latent attention, sinks, windows of plain caches) find no arrays in a
`RowValues` and raise an error; `layer_caches.can_hold_rows` finds out before the first request.
"""

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx
from mlx_lm.models import base

from engine.cache.quantized_kv import (
    BatchQuantizedKVCache,
    QuantizedCache,
    cache_arrays,
    set_arrays,
    slice_tokens,
)
from engine.cache.stepped_kv import BatchSteppedKVCache, SteppedKVCache
from engine.cache.window_kv import KeepingKVCache
from models.footprint import cache_slots

Array: TypeAlias = Any  # mlx ships no types
# From this many new tokens a row on, packed keys and values are unpacked for the layer, and attention uses the kernel of
# plain ones: scores of a piece of a prompt would take more memory than a layer's keys and values (models/footprint.py).
# Fewer tokens read the packed numbers, of which there are fewer.
_UNPACK_FROM = 32
# One sequence's keys and values of one layer: a SteppedKVCache, a QuantizedCache or a KeepingKVCache.
RowCache: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class RowValues:
    """Each row's cache, and its keys and values. It stands for an array of keys or of values."""

    rows: tuple[tuple[RowCache, Any, Any], ...]


class RowAttention:
    """Computes attention row by row for `RowValues`, and as mlx-lm does for everything else."""

    def __init__(self, quantized: Callable[..., Array]) -> None:
        """`quantized` is mlx-lm's attention over packed keys and values, which stores all scores."""
        self._quantized = quantized

    def __call__(self, queries: Array, q_keys: Any, q_values: Any, **options: Any) -> Array:
        """Return the attention; the names of the arguments are those of mlx-lm's function."""
        if not isinstance(q_keys, RowValues):
            return self._attend_packed(queries, q_keys, q_values, **options)
        scale, mask = options["scale"], options["mask"]
        found = [
            self._attend(one, *row, scale=scale, mask=mask)
            for one, row in zip(_split(queries), q_keys.rows, strict=True)
        ]
        return found[0] if len(found) == 1 else mx.concatenate(found)

    def _attend(
        self, queries: Array, cache: RowCache, keys: Any, values: Any, *, scale: float, mask: Any
    ) -> Array:
        if isinstance(cache, QuantizedCache):
            packing = {"group_size": cache.group_size, "bits": cache.bits}
            return self._attend_packed(queries, keys, values, scale=scale, mask=mask, **packing)
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)

    def _attend_packed(
        self, queries: Array, keys: Any, values: Any, *, scale: float, mask: Any, **packing: int
    ) -> Array:
        if queries.shape[2] < _UNPACK_FROM:
            return self._quantized(queries, keys, values, scale=scale, mask=mask, **packing)
        unpack: Callable[..., Array] = mx.dequantize
        plain = [unpack(*packed, **packing) for packed in (keys, values)]
        return mx.fast.scaled_dot_product_attention(queries, *plain, scale=scale, mask=mask)


def hook_attention() -> None:
    """Replace the attention of mlx-lm over packed caches, and of mlx-vlm if it is loaded; a second call does nothing."""
    loaded: tuple[Any, ...] = (base, sys.modules.get("mlx_vlm.models.base"))
    for module in loaded:
        theirs = getattr(module, "quantized_scaled_dot_product_attention", None)
        if theirs is not None and not isinstance(theirs, RowAttention):
            module.quantized_scaled_dot_product_attention = RowAttention(theirs)


class RowsKVCache:
    """One layer's caches of the rows of a batch, with the methods of mlx-lm's batch caches.

    It owns the caches that it is given.
    """

    def __init__(self, rows: Sequence[RowCache]) -> None:
        hook_attention()
        self.rows = list(rows)
        self._positions: Array | None = None
        self._right_padding: list[int] | None = None

    @classmethod
    def split(cls, batch: BatchSteppedKVCache | BatchQuantizedKVCache) -> "RowsKVCache":
        """Return the rows of a padded batch as views, which become arrays of their own with the next token."""
        rows: list[RowCache] = []
        for at, start in enumerate(batch.left_padding.tolist()):
            part = (slice(at, at + 1), slice(None), slice(start, batch.size()))
            if isinstance(batch, BatchQuantizedKVCache):
                packed = QuantizedCache(batch.bits)
                packed.group_size = batch.group_size
                set_arrays(packed, [array[part] for array in cache_arrays(batch)])
                rows.append(packed)
            else:
                row = _new_plain()
                row.keys, row.values = batch.keys[part], batch.values[part]
                rows.append(row)
            rows[-1].offset = batch.size() - start
        return cls(rows)

    @property
    def bits(self) -> int:
        """Bits of a packed number, 0 for plain caches. Its presence leads mlx-lm's attention to `RowAttention`."""
        return getattr(self.rows[0], "bits", 0)

    @property
    def group_size(self) -> int:
        """Numbers that share a scale; 0 for plain caches."""
        return getattr(self.rows[0], "group_size", 0)

    @property
    def can_pad(self) -> bool:
        """True if the rows can become one padded array, and prompts can be read together with padding."""
        return not isinstance(self.rows[0], KeepingKVCache)

    @property
    def offset(self) -> Array:
        """Tokens of each row, as an array: the positions of the next ones."""
        if self._positions is None:
            self._positions = mx.array([row.offset for row in self.rows])
        return self._positions

    @property
    def _idx(self) -> int:
        """Tokens of the longest row: mlx-vlm reads them here, and would wait for the device to count them."""
        return self.size()

    @property
    def state(self) -> list[Any]:
        """The arrays of all rows, to evaluate them."""
        return [(row.keys, row.values) for row in self.rows]

    @property
    def nbytes(self) -> int:
        """The allocated bytes, including room for later tokens."""
        return sum(row.nbytes for row in self.rows if not row.empty())

    def update_and_fetch(self, keys: Array, values: Array) -> tuple[RowValues, RowValues]:
        """Append keys and values, shape (rows, heads, tokens, size) each; return those of all tokens."""
        self._positions = None
        row_values = RowValues(
            tuple(
                (row, *row.update_and_fetch(key, value))
                for row, key, value in zip(self.rows, _split(keys), _split(values), strict=True)
            )
        )
        return row_values, row_values

    def make_mask(
        self, count: int, *, return_array: bool = False, window_size: int | None = None
    ) -> Any:
        """Return the mask for `count` new tokens a row, which is the same for all rows.

        Raises:
            TypeError: the model asks for a mask that would differ between rows.

        """
        if window_size is not None or (return_array and count > 1 and len(self.rows) > 1):
            raise TypeError("rows of different lengths have no common array as their mask")
        return self.rows[0].make_mask(count, return_array=return_array, window_size=None)

    def prepare(self, *, lengths: Sequence[int], right_padding: Sequence[int]) -> None:
        """Announce that the next tokens of each row end with padding. No token looks at what follows it."""
        del lengths
        self._right_padding = list(right_padding)

    def finalize(self) -> None:
        """Drop that padding."""
        for row, padding in zip(self.rows, self._right_padding or (), strict=False):
            row.trim(padding)
            _release_room(row)
        self._right_padding = self._positions = None

    def is_trimmable(self) -> bool:
        """Return whether the last tokens of each row can be dropped."""
        return all(row.is_trimmable() for row in self.rows)

    def trim(self, n: int) -> int:
        """Drop the last `n` tokens of each row."""
        self._positions = None
        return min(int(row.trim(n)) for row in self.rows)

    def filter(self, batch_indices: Any) -> None:
        """Keep only these rows."""
        kept: Any = batch_indices.tolist() if isinstance(batch_indices, mx.array) else batch_indices
        self.rows = [self.rows[at] for at in kept]
        self._positions = None

    def extend(self, other: "RowsKVCache") -> None:
        """Append the rows of another batch."""
        self.rows += other.rows
        self._positions = None

    def extract(self, idx: int) -> RowCache:
        """Return one row as a cache of its own. It is a view of the present values: a change of either copies."""
        row = self.rows[idx]
        alone = copy.copy(row)
        if not row.empty():
            # New array objects: an assignment to a part of an array changes the object.
            if isinstance(row, QuantizedCache):
                alone.keys, alone.values = slice_tokens(row, row.offset)
            elif isinstance(row, KeepingKVCache):
                alone.keys, alone.values = mx.array(row.keys), mx.array(row.values)
            else:
                alone.keys = row.keys[..., : row.offset, :]
                alone.values = row.values[..., : row.offset, :]
        return alone

    def size(self) -> int:
        """Return the number of tokens of the longest row."""
        return max(int(row.offset) for row in self.rows)

    def empty(self) -> bool:
        """Return whether no row has had a token."""
        return all(row.empty() for row in self.rows)


_new_plain: Callable[[], RowCache] = SteppedKVCache  # mlx-lm ships no types


def _split(array: Array) -> list[Array]:
    """Return the rows of an array as arrays with one row each."""
    rows = array.shape[0]
    return [array] if rows == 1 else list(mx.split(array, rows))


def _release_room(row: RowCache) -> None:
    """Free the steps that padding took beyond what the row's tokens take."""
    slots = cache_slots(row.offset, row.reserved)
    held = cache_arrays(row) if isinstance(row, QuantizedCache) else [row.keys, row.values]
    if held[0] is None or held[0].shape[2] <= slots:
        return
    parts = [mx.contiguous(part[..., :slots, :]) for part in held]
    if isinstance(row, QuantizedCache):
        set_arrays(row, parts)
    else:
        row.keys, row.values = parts
