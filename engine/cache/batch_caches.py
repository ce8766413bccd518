"""The layer caches of a batch, in the layout that suits the lengths of its rows. Worker thread only."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from engine.cache import batch_layout
from engine.cache.batch_layout import RowLength
from engine.cache.interface import LayerCache
from engine.cache.quantized_kv import BatchQuantizedKVCache, QuantizedCache
from engine.cache.row_caches import RowsKVCache
from engine.cache.stepped_kv import BatchSteppedKVCache, SteppedKVCache
from engine.cache.window_kv import KeepingKVCache


def set_reserved(caches: Sequence[LayerCache], tokens: int | None) -> None:
    """Tell the layer caches of one sequence for how many tokens memory is reserved; those that rotate ignore it."""
    for cache in caches:
        if isinstance(cache, SteppedKVCache | QuantizedCache):
            cache.reserved = tokens


def merge_caches(caches: Sequence[Sequence[LayerCache]], *, by_rows: bool) -> list[LayerCache]:
    """Make one batch of the caches of several sequences, and take them over.

    `by_rows` keeps plain and quantized layers row by row, and windows that keep their first tokens. Others are always
    merged:
    - A recurrent state has one size, so a merged one has no padding, and one kernel updates all rows.
    - A rotating window is padded up to its own size at most, for which each row has memory anyway.
    - A CacheList pairs keys with those of an index (DeepSeek V3.2); the model changes arrays of both in the cache, which
      rows do not have, and each row takes the memory of the longest.
    """
    return [_merge_layer(layer, by_rows=by_rows) for layer in zip(*caches, strict=True)]


class BatchCaches:
    """The layer caches of the generating rows."""

    def __init__(self, *, by_rows: bool) -> None:
        """`by_rows` says that the model can use `RowsKVCache`."""
        self._by_rows = by_rows
        self._is_padded = not by_rows
        self._steps = 0
        self._promised: tuple[int, ...] = ()
        """The tokens that the rows' caches were told to have memory for."""
        self._width = 0
        """Tokens of each row in padded arrays of which rows were removed; their memory is what it was."""
        self.layers: list[LayerCache] = []

    @property
    def nbytes(self) -> int:
        """Bytes that the caches hold."""
        return sum(cache.nbytes for cache in self.layers)

    @property
    def is_padded(self) -> bool:
        """True if all rows share one array a layer."""
        return self._is_padded

    def join(self, layers: list[LayerCache]) -> None:
        """Add rows: caches that `merge_caches` made, which this takes over."""
        self._split()
        if self._by_rows:
            layers = [_split_layer(layer) for layer in layers]
        if not self.layers:
            self.layers = layers
            return
        for ours, theirs in zip(self.layers, layers, strict=True):
            ours.extend(theirs)

    def extract(self, at: int) -> list[LayerCache]:
        """Return one row's caches, to be read only."""
        return [cache.extract(at) for cache in self.layers]

    def keep(self, rows: Sequence[int]) -> None:
        """Remove all rows but these."""
        self._steps, self._promised = 0, ()
        if not rows:
            self.layers, self._is_padded = [], not self._by_rows
            return
        self._width = max((_slots(cache) for cache in self.layers), default=0)
        index = mx.array(list(rows))
        for cache in self.layers:
            cache.filter(list(rows) if isinstance(cache, RowsKVCache) else index)

    def arrange(self, rows: Sequence[RowLength]) -> None:
        """Choose the layout for the next step, which takes no more memory than is reserved for the rows."""
        if not self._by_rows:
            return
        if self._is_padded:
            if not batch_layout.is_padding_cheap(rows):
                self._split()
        else:
            if batch_layout.should_pad(rows, steps=self._steps):
                self._pad()
            self._steps += 1
        promised = tuple(row.promised for row in rows)
        if promised != self._promised:
            self._promised = promised
            self._reserve(rows)

    def _reserve(self, rows: Sequence[RowLength]) -> None:
        for cache in self.layers:
            if isinstance(cache, RowsKVCache):
                for row, length in zip(cache.rows, rows, strict=True):
                    set_reserved([row], length.promised)
            elif isinstance(cache, BatchSteppedKVCache | BatchQuantizedKVCache):
                cache.reserved = batch_layout.padded_slots(rows)
                if self._width > cache.reserved:
                    _drop_room(cache)
        self._width = 0

    def _pad(self) -> None:
        """Merge the rows, one layer after the other: two copies of all layers might not fit."""
        for at, cache in enumerate(self.layers):
            if isinstance(cache, RowsKVCache) and cache.can_pad:
                self.layers[at] = cache.rows[0].merge(cache.rows)
                del cache
                mx.eval(self.layers[at].state)
        self._is_padded, self._promised = True, ()

    def _split(self) -> None:
        """Give each row a cache of its own. The next pass copies the rows, layer by layer."""
        self._steps, self._promised, self._width = 0, (), 0
        if not (self._by_rows and self._is_padded):
            return
        self.layers = [_split_layer(layer) for layer in self.layers]
        self._is_padded = False


def _merge_layer(layer: Sequence[LayerCache], *, by_rows: bool) -> Any:
    if by_rows and isinstance(layer[0], SteppedKVCache | QuantizedCache | KeepingKVCache):
        return RowsKVCache(layer)
    return layer[0].merge(list(layer))


def _split_layer(layer: LayerCache) -> Any:
    """Return a padded layer as views of its rows, and a layer of another kind as it is."""
    is_padded = isinstance(layer, BatchSteppedKVCache | BatchQuantizedKVCache)
    return RowsKVCache.split(layer) if is_padded else layer


def _slots(cache: LayerCache) -> int:
    """Return the tokens that each row of a padded cache has memory for; 0 for caches of other kinds."""
    if cache.empty() or not isinstance(cache, BatchSteppedKVCache | BatchQuantizedKVCache):
        return 0
    keys = cache.keys[0] if isinstance(cache, BatchQuantizedKVCache) else cache.keys
    return int(keys.shape[2])


def _drop_room(cache: BatchSteppedKVCache | BatchQuantizedKVCache) -> None:
    """Leave no room for later tokens: the next one copies the array into one of the right size."""
    cache.keys, cache.values = cache.keys_and_values()
