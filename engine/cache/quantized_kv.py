"""What a quantised KV cache is made of: six arrays a layer, and how they grow, are padded and told apart.

Works on mlx-lm's caches by their fields (`keys`, `values`, `bits`, `group_size`); knows nothing of batches.

KV caches of 2 to 8 bits a number, for one sequence and for a batch of ragged ones.

mlx-lm 0.32 has the form for one sequence only, so `kvCache.bits` could not be batched; what both forms share is its own.
Scaled dot-product attention takes the quantised path for every cache with `bits` (mlx_lm/models/base.py).
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, QuantizedKVCache, dynamic_roll
from typing_extensions import override

from models.footprint import CACHE_STEP

Array: TypeAlias = Any  # mlx ships no types
# Packed numbers, scales and biases, each (rows, heads, tokens, numbers a token), as mx.quantize makes them.
Packed: TypeAlias = tuple[Array, ...]

# What mx.quantize offers; 5 is left out because nothing else in the field knows it.
BITS = (2, 3, 4, 6, 8)
# mlx-lm's own size, and the smallest there is, for heads which that does not divide.
GROUP_SIZES = (64, 32)


def choose_group_size(*head_sizes: int) -> int:
    """Return how many numbers share a scale, for heads of these sizes.

    Raises:
        ValueError: no size that mx.quantize has divides them.

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
    """Return the first tokens' keys and values, without the room for those to come."""
    found = [part[..., :tokens, :] for part in cache_arrays(cache)]
    return tuple(found[:3]), tuple(found[3:])


def set_arrays(cache: Any, parts: list[Array]) -> None:
    """Give a cache its arrays, in the order of `parts`."""
    cache.keys, cache.values = tuple(parts[:3]), tuple(parts[3:])


def allocated_bytes(cache: Any) -> int:
    """Return what is allocated, padding and room for tokens to come included."""
    return 0 if cache.keys is None else sum(part.nbytes for part in cache_arrays(cache))


def common_packing(caches: Sequence[Any]) -> tuple[int, int]:
    """Return the bits and the size of a group that all of these have.

    Raises:
        ValueError: they differ.

    """
    found = sorted({(cache.bits, cache.group_size) for cache in caches})
    if len(found) != 1:
        raise ValueError(f"caches of different (bits, group size) cannot be one batch: {found}")
    return found[0]


def append_tokens(cache: Any, keys: Array, values: Array, *, at: int) -> None:
    """Pack keys and values and write them from token `at` on.

    A cache grows to the next whole step, whatever it grew from (see stepped.py).
    """
    tokens = keys.shape[2]
    new: list[Array] = []
    for array in (keys, values):
        new += mx.quantize(array, group_size=cache.group_size, bits=cache.bits)
    if cache.keys is None or at + tokens > cache.keys[0].shape[2]:
        more = -(-(at + tokens) // CACHE_STEP) * CACHE_STEP - at
        grown = [mx.zeros((*part.shape[:2], more, part.shape[3]), part.dtype) for part in new]
        if cache.keys is not None:
            held = [part[..., :at, :] for part in cache_arrays(cache)]
            grown = [mx.concatenate(list(pair), axis=2) for pair in zip(held, grown, strict=True)]
        set_arrays(cache, grown)
    for part, piece in zip(cache_arrays(cache), new, strict=True):
        part[..., at : at + tokens, :] = piece


def pad_row(cache: Any, like: list[Array], longest: int) -> list[Array]:
    """Return one sequence's arrays, padded on the left to `longest` tokens; empty ones as zeros like `like`."""
    if cache.keys is None or not cache.offset:
        return [mx.zeros((1, a.shape[1], longest, a.shape[3]), a.dtype) for a in like]
    padding = [(0, 0), (0, 0), (longest - cache.offset, 0), (0, 0)]
    return [mx.pad(part[..., : cache.offset, :], padding) for part in cache_arrays(cache)]


def align_rows(cache: Any, like: list[Array], end: int, width: int) -> list[Array]:
    """Return a batch's arrays moved so that its rows end at `end`, with room for `width` tokens."""
    if cache.keys is None:
        rows = cache.offset.shape[0]
        return [mx.zeros((rows, a.shape[1], width, a.shape[3]), a.dtype) for a in like]
    left = end - cache.size()
    held = [part[..., : width - left, :] for part in cache_arrays(cache)]
    right = width - left - held[0].shape[2]
    return [mx.pad(part, [(0, 0), (0, 0), (left, right), (0, 0)]) for part in held]


# mlx ships no types


class QuantizedCache(QuantizedKVCache):
    """One sequence's keys and values of one layer, and how to make a batch of several.

    The size of a group is found when the first keys come. Other than mlx-lm's, it takes the width of a packed token
    from what mx.quantize made: `size // (32 // bits)` is wrong for 3 and 6 bits of 128.
    """

    keys: Any  # Packed, or None before the first token
    values: Any

    def __init__(self, bits: int) -> None:
        super().__init__(group_size=GROUP_SIZES[0], bits=bits)

    @override
    def update_and_fetch(self, keys: Array, values: Array) -> tuple[Packed, Packed]:
        """Append keys and values, (1, heads, tokens, size) each; return all there are, packed."""
        if self.keys is None:
            self.group_size = choose_group_size(keys.shape[-1], values.shape[-1])
        append_tokens(self, keys, values, at=self.offset)
        self.offset += keys.shape[2]
        return slice_tokens(self, self.offset)

    @classmethod
    def merge(cls, caches: Sequence["QuantizedCache"]) -> "BatchQuantizedKVCache":
        """Return one cache for all of these sequences."""
        return BatchQuantizedKVCache.merge(caches)

    @override
    def size(self) -> int:
        """Return the number of tokens."""
        return int(self.offset)

    @property
    @override
    def nbytes(self) -> int:
        """What is allocated, room for tokens to come included."""
        return allocated_bytes(self)


class BatchQuantizedKVCache(BatchKVCache):
    """The same for a batch: every row ends at token `_idx`, and begins after its `left_padding`.

    State, masks, trimming, paddings and offsets are BatchKVCache's; here is what differs when a token is six arrays and not two.
    """

    keys: Any  # Packed, or None before the first token
    values: Any
    left_padding: Any  # arrays of whole numbers, one a row
    offset: Any
    _idx: int
    _right_padding: Any

    def __init__(self, left_padding: list[int], *, bits: int, group_size: int) -> None:
        super().__init__(left_padding)
        self.bits = bits
        self.group_size = group_size

    @override
    def update_and_fetch(self, keys: Array, values: Array) -> tuple[Packed, Packed]:
        """Append keys and values, (rows, heads, tokens, size) each; return all there are, packed."""
        if self.keys is None:
            self.group_size = choose_group_size(keys.shape[-1], values.shape[-1])
        append_tokens(self, keys, values, at=self._idx)
        self.offset = self.offset + keys.shape[2]
        self._idx += keys.shape[2]
        return self.keys_and_values()

    @override
    def keys_and_values(self) -> tuple[Packed, Packed]:
        """Return all tokens, without the room for those to come."""
        return slice_tokens(self, self._idx)

    @override
    def finalize(self) -> None:
        """Turn the padding that `prepare` announced on the right into padding on the left."""
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
        """Keep these rows alone, and no padding that all of them have."""
        self.offset = self.offset[batch_indices]
        self.left_padding = self.left_padding[batch_indices]
        spare = min(self.left_padding.tolist())
        self._idx -= spare
        self.left_padding -= spare
        if self.keys is not None:
            set_arrays(self, [part[batch_indices][..., spare:, :] for part in cache_arrays(self)])

    @override
    def extend(self, other: "BatchQuantizedKVCache") -> None:
        """Add another batch's rows below this one's.

        Raises:
            ValueError: they are packed in another way.

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
        """Return one row as a sequence of its own; it shares no memory with the batch."""
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
        """Return one cache for these sequences, the shorter ones padded on the left.

        Raises:
            ValueError: they are packed in different ways.

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
        """Return the number of tokens, those of the padding included."""
        return self._idx

    @property
    @override
    def nbytes(self) -> int:
        """What is allocated, padding and room for tokens to come included."""
        return allocated_bytes(self)
