"""Plain KV caches of mlx-lm whose size is always a whole number of steps.

mlx-lm's own caches add 256 tokens to the length at which they are full, so 64 sequences of 512 tokens may hold 1.5
times the bytes of the memory proof. The proof rounds up to whole steps, and so do these caches: to 256 tokens, or less
if the memory guard has reserved less for a sequence (`cache_slots` of models/footprint.py).
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache
from typing_extensions import override

from models.footprint import cache_slots

Array: TypeAlias = Any  # mlx ships no types


class SteppedKVCache(KVCache):
    """One sequence's keys and values of one layer."""

    keys: Any
    values: Any
    reserved: int | None = None
    """Tokens for which there is memory; None: whole steps of 256."""

    @override
    def update_and_fetch(self, keys: Array, values: Array) -> tuple[Array, Array]:
        """Append keys and values, shape (1, heads, tokens, size) each; return those of all tokens."""
        at, self.offset = self.offset, self.offset + keys.shape[2]
        _append(self, keys, values, at=at)
        return self.keys[:, :, : self.offset], self.values[:, :, : self.offset]

    @classmethod
    @override
    def merge(cls, caches: Sequence["SteppedKVCache"]) -> "BatchSteppedKVCache":
        """Merge the caches of several sequences into one batch."""
        return BatchSteppedKVCache.merge(caches)


class BatchSteppedKVCache(BatchKVCache):
    """The same for a batch: each row ends at token `_idx` and begins after its `left_padding`."""

    keys: Any
    values: Any
    left_padding: Any
    offset: Any
    reserved: int | None = None
    """Tokens of each row, padding included, for which there is memory; None: whole steps of 256."""
    _idx: int

    @override
    def update_and_fetch(self, keys: Array, values: Array) -> tuple[Array, Array]:
        """Append keys and values, shape (rows, heads, tokens, size) each; return those of all tokens."""
        tokens = keys.shape[2]
        at, self._idx = self._idx, self._idx + tokens
        self.offset = self.offset + tokens
        _append(self, keys, values, at=at)
        return self.keys[:, :, : self._idx], self.values[:, :, : self._idx]

    @override
    def extract(self, idx: int) -> SteppedKVCache:
        """Return one row as a cache of its own; it shares no memory with the batch."""
        make: Callable[[], SteppedKVCache] = SteppedKVCache  # mlx-lm ships no types
        cache = make()
        if self.keys is None:
            return cache
        start = self.left_padding.tolist()[idx]
        cache.keys = mx.contiguous(self.keys[idx : idx + 1, :, start : self._idx])
        cache.values = mx.contiguous(self.values[idx : idx + 1, :, start : self._idx])
        cache.offset = self._idx - start
        return cache

    @classmethod
    @override
    def merge(cls, caches: Sequence[SteppedKVCache]) -> "BatchSteppedKVCache":
        """Merge the caches of several sequences into one batch, the shorter ones padded on the left."""
        if not any(cache.offset for cache in caches):
            return cls([0] * len(caches))
        merge: Callable[..., BatchSteppedKVCache] = super().merge  # makes a cache of this class
        return merge(caches)


def _append(cache: Any, keys: Array, values: Array, *, at: int) -> None:
    """Write keys and values from token `at` on; grow the cache if there is no room."""
    end = at + keys.shape[2]
    if cache.keys is None or end > cache.keys.shape[2]:
        slots = cache_slots(end, cache.reserved)
        cache.keys, cache.values = (
            _grow(held, new, at, slots)
            for held, new in ((cache.keys, keys), (cache.values, values))
        )
    # An ellipsis takes twice the time: 16 rows of 32 layers do this 1,024 times for each token.
    cache.keys[:, :, at:end] = keys
    cache.values[:, :, at:end] = values


def _grow(held: Array | None, new: Array, at: int, slots: int) -> Array:
    rows, heads, _, size = new.shape
    room = mx.zeros((rows, heads, slots - at, size), new.dtype)
    return room if held is None else mx.concatenate([held[..., :at, :], room], axis=2)
