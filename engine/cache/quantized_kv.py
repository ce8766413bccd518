"""Quantized KV caches of 2 to 8 bits a number, for one sequence and for a batch of unequal lengths.

mlx-lm 0.32 has the cache for one sequence only, so `kvCache.bits` could not be batched. The classes here derive from
mlx-lm's. Its attention takes the quantized path for every cache with `bits` (mlx_lm/models/base.py). A layer has six
arrays: packed numbers, scales and biases of keys and of values. The functions work on the fields `keys`, `values`,
`bits` and `group_size` of either class.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, QuantizedKVCache, dynamic_roll
from typing_extensions import override

from models.footprint import cache_slots

Array: TypeAlias = Any  # mlx ships no types
# Packed numbers, scales and biases as mx.quantize returns them, each of shape (rows, heads, tokens, numbers a token).
Packed: TypeAlias = tuple[Array, ...]

# The bits that mx.quantize offers; 5 is left out because no other system supports it.
BITS = (2, 3, 4, 6, 8)
# mlx-lm's own size, and the smallest one of mx.quantize, for heads that 64 does not divide.
GROUP_SIZES = (64, 32)


def choose_group_size(*head_sizes: int) -> int:
    """Return the number of numbers that share a scale, for heads of these sizes.

    Raises:
        ValueError: no group size of mx.quantize divides all of them.

    """
    for size in GROUP_SIZES:
        if all(head % size == 0 for head in head_sizes):
            return size
    heads = " and ".join(str(head) for head in dict.fromkeys(head_sizes))
    raise ValueError(
        f"kvCache.bits needs heads whose size is a multiple of {GROUP_SIZES[-1]}, and this model's "
        f"have {heads} numbers; leave kvCache.bits out"
    )


def cache_arrays(cache: Any) -> list[Array]:
    """Return the arrays of the keys, then those of the values."""
    return [*cache.keys, *cache.values]


def slice_tokens(cache: Any, tokens: int) -> tuple[Packed, Packed]:
    """Return the keys and values of the first tokens, without the room for later ones."""
    found = [part[..., :tokens, :] for part in cache_arrays(cache)]
    return tuple(found[:3]), tuple(found[3:])


def set_arrays(cache: Any, parts: list[Array]) -> None:
    """Set a cache's arrays, in the order of `cache_arrays`."""
    cache.keys, cache.values = tuple(parts[:3]), tuple(parts[3:])


def allocated_bytes(cache: Any) -> int:
    """Return the allocated bytes, including padding and room for later tokens."""
    return 0 if cache.keys is None else sum(part.nbytes for part in cache_arrays(cache))


def common_packing(caches: Sequence[Any]) -> tuple[int, int]:
    """Return the bits and the group size that all of these caches have.

    Raises:
        ValueError: the caches differ.

    """
    found = sorted({(cache.bits, cache.group_size) for cache in caches})
    if len(found) != 1:
        raise ValueError(f"caches of different (bits, group size) cannot be one batch: {found}")
    return found[0]


def append_tokens(cache: Any, keys: Array, values: Array, *, at: int) -> None:
    """Pack keys and values and write them from token `at` on.

    The cache grows in steps, as far as it has memory (see stepped_kv.py).
    """
    tokens = keys.shape[2]
    new: list[Array] = []
    for array in (keys, values):
        new += mx.quantize(array, group_size=cache.group_size, bits=cache.bits)
    if cache.keys is None or at + tokens > cache.keys[0].shape[2]:
        more = cache_slots(at + tokens, cache.reserved) - at
        grown = [mx.zeros((*part.shape[:2], more, part.shape[3]), part.dtype) for part in new]
        if cache.keys is not None:
            held = [part[..., :at, :] for part in cache_arrays(cache)]
            grown = [mx.concatenate(list(pair), axis=2) for pair in zip(held, grown, strict=True)]
        set_arrays(cache, grown)
    for part, piece in zip(cache_arrays(cache), new, strict=True):
        part[..., at : at + tokens, :] = piece


def pad_row(cache: Any, like: list[Array], longest: int) -> list[Array]:
    """Return one sequence's arrays, padded on the left to `longest` tokens; zeros like `like` for an empty cache."""
    if cache.keys is None or not cache.offset:
        return [mx.zeros((1, a.shape[1], longest, a.shape[3]), a.dtype) for a in like]
    padding = [(0, 0), (0, 0), (longest - cache.offset, 0), (0, 0)]
    return [mx.pad(part[..., : cache.offset, :], padding) for part in cache_arrays(cache)]


def align_rows(cache: Any, like: list[Array], end: int, width: int) -> list[Array]:
    """Return a batch's arrays, moved so that all rows end at `end`, with room for `width` tokens."""
    if cache.keys is None:
        rows = cache.offset.shape[0]
        return [mx.zeros((rows, a.shape[1], width, a.shape[3]), a.dtype) for a in like]
    left = end - cache.size()
    held = [part[..., : width - left, :] for part in cache_arrays(cache)]
    right = width - left - held[0].shape[2]
    return [mx.pad(part, [(0, 0), (0, 0), (left, right), (0, 0)]) for part in held]


class QuantizedCache(QuantizedKVCache):
    """One sequence's keys and values of one layer.

    The group size is chosen at the first keys. Unlike mlx-lm's class, this one takes the width of a packed token from
    the result of mx.quantize: `size // (32 // bits)` is wrong for 3 and 6 bits of 128.
    """

    keys: Any  # Packed, or None before the first token
    values: Any
    reserved: int | None = None
    """Tokens for which there is memory; None: whole steps of 256."""

    def __init__(self, bits: int) -> None:
        super().__init__(group_size=GROUP_SIZES[0], bits=bits)

    @override
    def update_and_fetch(self, keys: Array, values: Array) -> tuple[Packed, Packed]:
        """Append keys and values, shape (1, heads, tokens, size) each; return those of all tokens, packed."""
        if self.keys is None:
            self.group_size = choose_group_size(keys.shape[-1], values.shape[-1])
        append_tokens(self, keys, values, at=self.offset)
        self.offset += keys.shape[2]
        return slice_tokens(self, self.offset)

    @classmethod
    def merge(cls, caches: Sequence["QuantizedCache"]) -> "BatchQuantizedKVCache":
        """Merge the caches of several sequences into one batch."""
        return BatchQuantizedKVCache.merge(caches)

    @override
    def size(self) -> int:
        """Return the number of tokens."""
        return int(self.offset)

    @property
    @override
    def nbytes(self) -> int:
        """The allocated bytes, including room for later tokens."""
        return allocated_bytes(self)


class BatchQuantizedKVCache(BatchKVCache):
    """The same for a batch: each row ends at token `_idx` and begins after its `left_padding`.

    BatchKVCache provides states, masks, trimming, paddings and offsets. This class overrides the methods that touch the
    arrays, of which a token has six instead of two.
    """

    keys: Any  # Packed, or None before the first token
    values: Any
    left_padding: Any  # integer arrays, one number a row
    offset: Any
    reserved: int | None = None
    """Tokens of each row, padding included, for which there is memory; None: whole steps of 256."""
    _idx: int
    _right_padding: Any

    def __init__(self, left_padding: list[int], *, bits: int, group_size: int) -> None:
        super().__init__(left_padding)
        self.bits = bits
        self.group_size = group_size

    @override
    def update_and_fetch(self, keys: Array, values: Array) -> tuple[Packed, Packed]:
        """Append keys and values, shape (rows, heads, tokens, size) each; return those of all tokens, packed."""
        if self.keys is None:
            self.group_size = choose_group_size(keys.shape[-1], values.shape[-1])
        append_tokens(self, keys, values, at=self._idx)
        self.offset = self.offset + keys.shape[2]
        self._idx += keys.shape[2]
        return self.keys_and_values()

    @override
    def keys_and_values(self) -> tuple[Packed, Packed]:
        """Return the keys and values of all tokens, without the room for later ones."""
        return slice_tokens(self, self._idx)

    @override
    def finalize(self) -> None:
        """Move the right padding that `prepare` announced to the left."""
        padding = self._right_padding
        if padding is None:
            return
        roll: Callable[..., Array] = dynamic_roll  # mlx-lm ships no types
        set_arrays(self, [roll(part, padding[:, None], axis=2) for part in cache_arrays(self)])
        self.offset = self.offset - padding
        self.left_padding += padding
        self._right_padding = None

    @override
    def filter(self, batch_indices: Any) -> None:
        """Keep only these rows, and drop padding that all of them share."""
        self.offset = self.offset[batch_indices]
        self.left_padding = self.left_padding[batch_indices]
        spare = min(self.left_padding.tolist())
        self._idx -= spare
        self.left_padding -= spare
        if self.keys is not None:
            set_arrays(self, [part[batch_indices][..., spare:, :] for part in cache_arrays(self)])

    @override
    def extend(self, other: "BatchQuantizedKVCache") -> None:
        """Append the rows of another batch.

        Raises:
            ValueError: the batches differ in bits or group size.

        """
        both = (self, other)
        filled = [cache for cache in both if cache.keys is not None]
        self.bits, self.group_size = common_packing(filled or both)
        end = max(cache.size() for cache in both)
        padded = [cache.left_padding + (end - cache.size()) for cache in both]
        if filled:
            like = cache_arrays(filled[0])
            width = max(cache_arrays(cache)[0].shape[2] for cache in filled)
            columns = zip(*(align_rows(cache, like, end, width) for cache in both), strict=True)
            set_arrays(self, [mx.concatenate(list(pair)) for pair in columns])
            self.left_padding, self._idx = mx.concatenate(padded), end
        else:
            self.left_padding = mx.concatenate([cache.left_padding for cache in both])
        self.offset = mx.concatenate([cache.offset for cache in both])

    @override
    def extract(self, idx: int) -> QuantizedCache:
        """Return one row as a cache of its own; it shares no memory with the batch."""
        cache = QuantizedCache(self.bits)
        cache.group_size = self.group_size
        if self.keys is None:
            return cache
        start = self.left_padding.tolist()[idx]
        own = [part[idx : idx + 1, :, start : self._idx] for part in cache_arrays(self)]
        set_arrays(cache, [mx.contiguous(part) for part in own])
        cache.offset = self._idx - start
        return cache

    @classmethod
    @override
    def merge(cls, caches: Sequence[QuantizedCache]) -> "BatchQuantizedKVCache":
        """Merge the caches of several sequences into one batch, the shorter ones padded on the left.

        Raises:
            ValueError: the caches differ in bits or group size.

        """
        filled = [cache for cache in caches if cache.keys is not None]
        bits, size = common_packing(filled or caches)
        longest = max(cache.offset for cache in caches)
        batch = cls([longest - cache.offset for cache in caches], bits=bits, group_size=size)
        if not longest:
            return batch
        like = cache_arrays(filled[0])
        rows = [pad_row(cache, like, longest) for cache in caches]
        set_arrays(batch, [mx.concatenate(list(column)) for column in zip(*rows, strict=True)])
        batch.offset += longest
        batch._idx = longest
        return batch

    @override
    def size(self) -> int:
        """Return the number of tokens, including padding."""
        return self._idx

    @property
    @override
    def nbytes(self) -> int:
        """The allocated bytes, including padding and room for later tokens."""
        return allocated_bytes(self)
