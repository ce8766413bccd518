"""Caches of a batch that keep each row by itself: a row joins and leaves without a copy, and none is padded.

mlx-lm's models hand what `update_and_fetch` returns to `scaled_dot_product_attention` of mlx_lm.models.base, and so do
mlx-vlm's. A `RowsKVCache` returns `RowValues`, and `hook_attention` replaces that function wherever a model's module
has imported it.

Latent attention (DeepSeek V3, Kimi) first multiplies queries by the small rotary part of the keys, which is padded for
that; the latents themselves are not. Models that use keys and values in another way find no arrays in `RowValues` and
raise an error; `layer_caches.can_hold_rows` finds out before the first request.
"""

import copy
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import mlx.core as mx
from mlx_lm.models import base
from mlx_lm.models.base import create_causal_mask

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
# What mlx-lm's and mlx-vlm's attention takes after queries, keys and values.
_NAMES: Final = ("cache", "scale", "mask", "sinks")
# One sequence's keys and values of one layer: a SteppedKVCache, a QuantizedCache or a KeepingKVCache.
RowCache: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class RowValues:
    """Each row's cache, and its keys or its values. It stands for an array of them."""

    caches: tuple[RowCache, ...]
    values: tuple[Any, ...]

    def swapaxes(self, first: int, second: int) -> Array:
        """Return a padded array with two axes exchanged."""
        return self._pad().swapaxes(first, second)

    def __matmul__(self, other: Array) -> Array:
        """Return the product of a padded array and another one."""
        return self._pad() @ other

    def _pad(self) -> Array:
        """Return one array of all rows, padded on the left: the model asked for a mask that hides the padding."""
        longest = max(row.shape[2] for row in self.values)
        return mx.concatenate(
            [mx.pad(r, [(0, 0), (0, 0), (longest - r.shape[2], 0), (0, 0)]) for r in self.values]
        )


@dataclass(frozen=True, slots=True)
class RowAttention:
    """Stands for `scaled_dot_product_attention`: row by row for `RowValues`, and as theirs for everything else."""

    theirs: Callable[..., Array]

    def __call__(self, queries: Array, keys: Any, values: Any, *places: Any, **names: Any) -> Array:
        """Return the attention; further arguments are those of mlx-lm's function.

        A mask, or scores to add, is an array of rows that are padded on the left.
        """
        if not isinstance(keys, RowValues):
            return self.theirs(queries, keys, values, *places, **names)
        names |= zip(_NAMES, places, strict=False)
        scale, mask, sinks = names["scale"], names["mask"], names.get("sinks")
        attended: list[Array] = []
        for at, (row, query) in enumerate(zip(keys.caches, _split(queries), strict=True)):
            is_shared = not isinstance(mask, mx.array) or mask.ndim < 4 or mask.shape[0] == 1
            options = {"scale": scale, "mask": mask if is_shared else mask[at : at + 1]}
            pair = keys.values[at], values.values[at]
            if isinstance(row, QuantizedCache):
                if sinks is not None:
                    raise ValueError("packed keys and values have no kernel for attention sinks")
                options |= {"group_size": row.group_size, "bits": row.bits}
                attended.append(
                    base.quantized_scaled_dot_product_attention(query, *pair, **options)
                )
                continue
            if isinstance(options["mask"], mx.array):
                options["mask"] = options["mask"][..., -pair[0].shape[2] :]
            attended.append(
                mx.fast.scaled_dot_product_attention(query, *pair, sinks=sinks, **options)
            )
        return mx.concatenate(attended)


@dataclass(frozen=True, slots=True)
class PackedAttention:
    """Stands for `quantized_scaled_dot_product_attention`: unpacks for the pieces of prompts."""

    theirs: Callable[..., Array]

    def __call__(
        self, queries: Array, q_keys: Any, q_values: Any, *, scale: float, mask: Any, **packing: int
    ) -> Array:
        """Return the attention; the names of the arguments are those of mlx-lm's function."""
        if queries.shape[2] < _UNPACK_FROM:
            return self.theirs(queries, q_keys, q_values, scale=scale, mask=mask, **packing)
        unpack: Callable[..., Array] = mx.dequantize
        plain = [unpack(*packed, **packing) for packed in (q_keys, q_values)]
        return mx.fast.scaled_dot_product_attention(queries, *plain, scale=scale, mask=mask)


_HOOKS: Final = {
    "scaled_dot_product_attention": RowAttention,
    "quantized_scaled_dot_product_attention": PackedAttention,
}


def hook_attention() -> None:
    """Replace the attention in the modules of mlx-lm's and mlx-vlm's models; does nothing if no module is new."""
    _hook_modules(len(sys.modules))


@functools.lru_cache(maxsize=1)
def _hook_modules(_count: int) -> None:
    for name, module in list(sys.modules.items()):
        if not name.startswith(("mlx_lm.models.", "mlx_vlm.models.")):
            continue
        for function, hook in _HOOKS.items():
            theirs = vars(module).get(function)
            if theirs is not None and not isinstance(theirs, hook):
                setattr(module, function, hook(theirs))


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

    def update_and_fetch(self, keys: Array, values: Array) -> tuple[Any, Any]:
        """Append keys and values, shape (rows, heads, tokens, size) each; return those of all tokens.

        They are `RowValues`, or the arrays of a single row that is not packed.
        """
        self._positions = None
        if len(self.rows) == 1 and not isinstance(self.rows[0], QuantizedCache):
            alone: tuple[Array, Array] = self.rows[0].update_and_fetch(keys, values)
            return alone
        pairs = [
            row.update_and_fetch(key, value)
            for row, key, value in zip(self.rows, _split(keys), _split(values), strict=True)
        ]
        caches = tuple(self.rows)
        all_keys, all_values = zip(*pairs, strict=True)
        return RowValues(caches, all_keys), RowValues(caches, all_values)

    def make_mask(
        self, count: int, *, return_array: bool = False, window_size: int | None = None
    ) -> Any:
        """Return the mask for `count` new tokens a row; an array is that of rows that are padded on the left.

        Raises:
            TypeError: rows that keep their first tokens would need masks of their own.

        """
        if len(self.rows) == 1 or not (return_array or window_size):
            mask = self.rows[0].make_mask(count, return_array=return_array, window_size=window_size)
            if isinstance(mask, mx.array) and len(self.rows) > 1:
                raise TypeError("rows that keep their first tokens have no common mask")
            return mask
        if not self.can_pad:
            raise TypeError("rows that keep their first tokens have no common mask")
        longest = self.size()
        padding = mx.array([longest - int(row.offset) for row in self.rows])
        return create_causal_mask(
            count, offset=longest, left_padding=padding, window_size=window_size
        )

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
