"""Makes a model's empty layer caches with a deployment's options, and measures the bytes that they need.

The model's own `make_cache` decides first. Only plain KV caches are replaced: rotating windows, recurrent states and
compressed latents have no other form. Measuring computes nothing: MLX knows the shapes of a graph that it has not
evaluated, so it takes a millisecond a layer and no memory.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from engine.cache.batch_caches import merge_caches
from engine.cache.interface import KvOptions, LayerCache
from engine.cache.quantized_kv import BITS, QuantizedCache
from engine.cache.row_caches import RowsKVCache, hook_attention
from engine.cache.stepped_kv import SteppedKVCache
from engine.cache.window_kv import KeepingKVCache
from models.footprint import CACHE_STEP, KvFootprint

# With a smaller window a model cannot finish a sentence.
_SMALLEST_WINDOW = 16


def make_caches(model: Any, options: KvOptions) -> list[LayerCache]:
    """Return empty caches for one sequence, one a layer.

    Raises:
        ValueError: the options are invalid, or the model cannot use them; says which field to leave out.

    """
    _check_options(options)
    caches: list[LayerCache] = make_prompt_cache(model)
    # Only this exact class: a subclass keeps other values, which quantization might break.
    plain = [type(cache) is KVCache for cache in caches]
    if options != KvOptions() and not any(plain):
        kinds = ", ".join(count_kinds(caches))
        raise ValueError(
            f"{_option_name(options)} changes plain KV caches, and this model has none (it has {kinds}); leave it out"
        )
    make = _cache_factory(options)
    return [make() if is_plain else cache for cache, is_plain in zip(caches, plain, strict=True)]


def try_model(model: Any, options: KvOptions) -> str:
    """Try a model with these caches; return the kinds of its caches for the log.

    Computes nothing: MLX builds the graph and its shapes, and raises an error for shapes that do not fit.

    Raises:
        ValueError: the model cannot use such caches; says which field to leave out.

    """
    caches = make_caches(model, options)
    try:
        for tokens in (2, 1):
            model(mx.zeros((1, tokens), dtype=mx.int32), cache=caches)
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        # Latent attention uses the arrays directly, and attention sinks have no quantized kernel.
        if options == KvOptions():
            raise
        raise ValueError(f"this model cannot use {_option_name(options)}: {error}") from error
    if options.keep and not can_hold_rows(model, options):
        raise ValueError(
            "this model cannot use kvCache.keep: its layers need one array or one mask for all requests, which cannot keep "
            "the first tokens of each; leave keep out"
        )
    return ", ".join(f"{count} x {kind}" for kind, count in count_kinds(caches).items())


def can_hold_rows(model: Any, options: KvOptions) -> bool:
    """Return whether a batch of the model's sequences can keep them row by row (row_caches.py).

    Computes nothing, like `try_model`. A model whose layers are all recurrent has nothing to keep by rows.
    """
    return _accepts_rows(model, options, tokens=1)


def can_read_rows(model: Any, options: KvOptions) -> bool:
    """Return whether prompts can be read together into rows; otherwise they are padded until they are read.

    Latent attention unpacks quantized weights for several tokens, which takes arrays.
    """
    return _accepts_rows(model, options, tokens=2)


def _accepts_rows(model: Any, options: KvOptions, *, tokens: int) -> bool:
    """Let two rows of different lengths read so many tokens."""
    caches = merge_caches([_fill_caches(model, options, n) for n in (1, 2)], by_rows=True)
    if not any(isinstance(cache, RowsKVCache) for cache in caches):
        return False
    try:
        model(mx.zeros((2, tokens), dtype=mx.int32), cache=caches)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False
    return True


def count_kinds(caches: Sequence[LayerCache]) -> dict[str, int]:
    """Return the number of layers by class of cache, most frequent first."""
    return dict(Counter(type(cache).__name__ for cache in caches).most_common())


def _check_options(options: KvOptions) -> None:
    if options.bits is not None and options.window is not None:
        raise ValueError(
            "kvCache.bits does not go with kvCache.window: a cache that rotates cannot be quantized; leave one out"
        )
    if options.bits is not None and options.bits not in BITS:
        known = ", ".join(str(bits) for bits in BITS)
        raise ValueError(f"kvCache.bits must be one of {known}, not {options.bits}")
    if options.window is not None and options.window < _SMALLEST_WINDOW:
        raise ValueError(
            f"kvCache.window must be at least {_SMALLEST_WINDOW}, not {options.window}"
        )
    if not 0 <= 2 * options.keep <= (options.window or 0):
        raise ValueError(
            f"kvCache.keep must be at most half of kvCache.window, not {options.keep} of {options.window}"
        )


def _cache_factory(options: KvOptions) -> Callable[[], LayerCache]:
    if options.bits is not None:
        bits = options.bits
        hook_attention()
        return lambda: QuantizedCache(bits)
    if options.window is None:
        return SteppedKVCache
    # mlx-lm ships no types
    rotating: Callable[..., LayerCache] = KeepingKVCache if options.keep else RotatingKVCache
    return lambda: rotating(max_size=options.window, keep=options.keep)


def _option_name(options: KvOptions) -> str:
    if options.keep:
        return "kvCache.keep"
    return "kvCache.window" if options.bits is None else f"kvCache.bits {options.bits}"


def measure_footprint(model: Any, options: KvOptions) -> KvFootprint:
    """Measure the bytes that this model's sequences need with such caches.

    Raises:
        ValueError: the model cannot use such caches.

    """
    short, long = _fill_caches(model, options, 1), _fill_caches(model, options, 1 + CACHE_STEP)
    rules = [_compare(one, other) for one, other in zip(short, long, strict=True)]
    windows: Counter[int] = Counter()
    for rule in rules:
        for window, each in rule.windows:
            windows[window] += each
    return KvFootprint(
        constant_bytes=sum(rule.constant_bytes for rule in rules),
        token_bytes=sum(rule.token_bytes for rule in rules),
        windows=tuple(sorted(windows.items())),
        by_rows=can_hold_rows(model, options),
    )


def _fill_caches(model: Any, options: KvOptions, tokens: int) -> list[LayerCache]:
    """Return caches after `tokens` tokens. The last one is read alone: only then do rotating caches settle."""
    caches = make_caches(model, options)
    for count in (tokens - 1, 1):
        if count:
            model(mx.zeros((1, count), dtype=mx.int32), cache=caches)
    return caches


def _compare(short: LayerCache, long: LayerCache) -> KvFootprint:
    match short:
        case CacheList():
            parts = (
                _compare(one, other) for one, other in zip(short.caches, long.caches, strict=True)
            )
            return sum(parts, KvFootprint())
        case ArraysCache():
            return KvFootprint(constant_bytes=short.nbytes)
        case RotatingKVCache():
            return KvFootprint(windows=((short.max_size, _token_bytes(short)),))
        case KVCache() | QuantizedKVCache():
            return KvFootprint(token_bytes=_token_bytes(short))
        case _:
            # A cache class of the model's own module, which may or may not grow with the tokens.
            each = -(-(long.nbytes - short.nbytes) // CACHE_STEP)
            return KvFootprint(constant_bytes=short.nbytes, token_bytes=max(0, each))


def _token_bytes(cache: LayerCache) -> int:
    leaves = cast("list[tuple[str, Any]]", tree_flatten((cache.keys, cache.values)))
    arrays = [array for _, array in leaves]
    slots = arrays[0].shape[2]
    return sum(-(-array.nbytes // slots) for array in arrays)
