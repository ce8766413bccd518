"""Takes back tokens that a sequence's or a row's layer caches have read, whatever the kind of layer. Worker thread only.

- Layers that keep all tokens drop the last ones.
- A window drops them right after a pass over several tokens: mlx-lm then has its tokens in order, with a whole window
  before the first new one (`_update_concat`). After passes over one token each it has overwritten the oldest ones.
- A recurrent state cannot forget a token. It is kept from before the tokens, and those that stay are read again.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import (
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from engine.cache.interface import LayerCache
from engine.cache.row_caches import RowsKVCache

Classes: TypeAlias = tuple[type[Any], ...]  # mlx-lm ships no types

_PLAIN: Final[Classes] = (KVCache, QuantizedKVCache, BatchKVCache)
_WINDOWS: Final[Classes] = (RotatingKVCache, BatchRotatingKVCache)


class Rollback:
    """The way back to the tokens that caches hold when it is made. It is used once."""

    def __init__(self, caches: Sequence[LayerCache], *, by_token: bool = False) -> None:
        """`by_token` says that tokens will be read one by one, and not in one pass of several."""
        self._by_rows = [cache for cache in caches if isinstance(cache, RowsKVCache)]
        self._layers = list(_layers(caches))
        lasting = _PLAIN if by_token else (*_PLAIN, *_WINDOWS)
        self.rereads = not all(isinstance(layer, lasting) for layer in self._layers)
        """True if tokens that stay must be read again."""
        # An assignment to a part of an array changes the object, so the states are new objects.
        self._states: dict[int, Any] = {
            at: tree_map(_alias, layer.state)
            for at, layer in enumerate(self._layers)
            if self.rereads and not isinstance(layer, _PLAIN)
        }

    def take_back(self, read: int, *, keep: int) -> int:
        """Take back the `read` tokens that were read since, all but the first `keep`.

        Returns:
            The number of the first tokens that the caches have no more, and that must be read again: `keep` or 0.

        """
        if read == keep:
            return 0
        count = read if self.rereads else read - keep
        for at, layer in enumerate(self._layers):
            if at in self._states:
                layer.state = self._states[at]
            elif isinstance(layer, _WINDOWS):
                _shorten(layer, count)
            else:
                layer.trim(count)
        for cache in self._by_rows:
            cache.trim(0)  # it remembers the positions of its rows
        return keep if self.rereads else 0


def _layers(caches: Sequence[LayerCache]) -> Iterator[LayerCache]:
    """Yield the caches, with lists and rows replaced by their members."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from _layers(cache.caches)
        elif isinstance(cache, RowsKVCache):
            yield from cache.rows
        else:
            yield cache


def _alias(value: Any) -> Any:
    return mx.array(value) if isinstance(value, mx.array) else value


def _shorten(window: LayerCache, count: int) -> None:
    """Drop the last tokens of a window that has its tokens in order."""
    stop = window._idx - count  # noqa: SLF001 - the place after the last token; `state` has it, too
    window.keys, window.values = window.keys[..., :stop, :], window.values[..., :stop, :]
    window.trim(count)
