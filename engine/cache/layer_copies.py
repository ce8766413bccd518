"""Copies tokens out of a sequence's mlx-lm caches into blocks, and fills empty caches from blocks.

Each layer's cache is of one of three kinds (block_tree.py describes their needs):
- whole: KVCache and QuantizedKVCache, which hold every token;
- a window: RotatingKVCache. Tokens are copied while they are present; as many as the window has are put back;
- a state, copied whole: all others (recurrent layers, chunked caches, rotating caches that keep their first tokens).
A CacheList counts as the caches in it.

A block has one array for all keys and values of one shape, (layers and both, heads, tokens, size). One array per layer
would exhaust the roughly 500,000 buffers that Metal allows.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, RotatingKVCache

from engine.cache.block_tree import BlockRules
from engine.cache.interface import LayerCache

Array: TypeAlias = Any  # mlx ships no types
Shape: TypeAlias = tuple[int, int, Any]  # heads, numbers a token, mlx dtype
Block: TypeAlias = tuple[Array, ...]  # one array for each shape of a BlockPacking
Cut: TypeAlias = tuple[int, int]  # the first token, and the first token after

# Bytes that are copied at once, in both directions. A copy has two steps, and the first one needs this much extra memory.
_SLAB_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """The kinds of a model's caches; numbers are indices of the flattened list."""

    whole: tuple[int, ...]
    windows: tuple[tuple[int, tuple[int, ...]], ...]
    """(window size in tokens, the caches of this size)."""
    states: tuple[int, ...]

    @property
    def packed(self) -> tuple[tuple[int, ...], ...]:
        """The caches of each kind that can be copied by tokens: whole, then one group a window size."""
        return self.whole, *(caches for _, caches in self.windows)

    def rules(self, block: int) -> BlockRules:
        """Return the rules for blocks of `block` tokens."""
        windows = tuple(size for size, _ in self.windows)
        return BlockRules(block=block, windows=windows, has_state=bool(self.states))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPacking:
    """The places of some caches' arrays in a block."""

    columns: tuple[tuple[int, Shape], ...]
    """(cache, shape), cache by cache. Arrays of one shape are rows of one block array, in this order."""
    shapes: tuple[Shape, ...]
    token_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRows:
    """One layer's arrays, shape (1, heads, places, size) each, and the places of its tokens."""

    arrays: tuple[Array, ...]
    spans: tuple[tuple[int, int, int], ...]
    """(first token, its place, number of tokens), in token order without gaps."""

    @property
    def start(self) -> int:
        """The first token that is still present."""
        return self.spans[0][0]

    @property
    def stop(self) -> int:
        """The number of tokens that the cache has read."""
        token, _, count = self.spans[-1]
        return token + count

    def take(self, array: Array, cut: Cut) -> Array:
        """Return some tokens of one of the arrays, as a view where possible."""
        pieces = []
        for token, place, count in self.spans:
            first, last = max(cut[0], token), min(cut[1], token + count)
            if first < last:
                pieces.append(array[..., place + first - token : place + last - token, :])
        return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=2)


def flatten_caches(caches: Sequence[LayerCache]) -> list[LayerCache]:
    """Return the caches with every CacheList replaced by its members."""
    layer_caches: list[LayerCache] = []
    for cache in caches:
        layer_caches += flatten_caches(cache.caches) if isinstance(cache, CacheList) else [cache]
    return layer_caches


def find_layout(caches: Sequence[LayerCache]) -> CacheLayout:
    """Return the kinds of these caches."""
    whole, states = [], []
    windows: dict[int, list[int]] = {}
    for at, leaf in enumerate(flatten_caches(caches)):
        if isinstance(leaf, KVCache | QuantizedKVCache):
            whole.append(at)
        elif type(leaf) is RotatingKVCache and leaf.keep == 0:
            windows.setdefault(leaf.max_size, []).append(at)
        else:
            states.append(at)
    sizes = tuple((size, tuple(found)) for size, found in sorted(windows.items()))
    return CacheLayout(whole=tuple(whole), windows=sizes, states=tuple(states))


def read_rows(leaf: LayerCache) -> CacheRows | None:
    """Return the part of a cache that can be copied by tokens; None before the first token."""
    if leaf.keys is None or not leaf.offset:
        return None
    keys, values, end = leaf.keys, leaf.values, leaf.offset
    if isinstance(leaf, QuantizedKVCache):
        return CacheRows(arrays=(*keys, *values), spans=((0, 0, end),))
    arrays = (keys, values)
    if not isinstance(leaf, RotatingKVCache):
        return CacheRows(arrays=arrays, spans=((0, 0, end),))
    places, at = leaf.keys.shape[2], leaf._idx  # noqa: SLF001 - the next token's place; `state` has it, too
    if at >= min(end, places):
        return CacheRows(arrays=arrays, spans=((end - at, 0, at),))
    # The cache has wrapped around: the oldest token is at the next token's place.
    return CacheRows(arrays=arrays, spans=((end - places, at, places - at), (end - at, 0, at)))


def find_packing(held: dict[int, CacheRows]) -> BlockPacking:
    """Return the places in a block for the arrays of these caches, given by number."""
    arrays = [(at, array) for at, found in held.items() for array in found.arrays]
    columns = tuple((at, (a.shape[1], a.shape[3], a.dtype)) for at, a in arrays)
    size = sum(array.shape[1] * array.shape[3] * array.itemsize for _, array in arrays)
    shapes = tuple(dict.fromkeys(shape for _, shape in columns))
    return BlockPacking(columns=columns, shapes=shapes, token_bytes=size)


def copy_blocks(
    held: dict[int, CacheRows], packed: BlockPacking, cuts: Sequence[Cut]
) -> list[Block]:
    """Return evaluated copies of these token ranges, in the same order; `cuts` are ascending and may have gaps."""
    arrays = [(rows, array) for rows in held.values() for array in rows.arrays]
    blocks: list[Block] = []
    for run in _group_cuts(cuts, packed.token_bytes):
        first, last = run[0][0], run[-1][1]
        slabs = [
            concatenate_copy(
                [
                    found.take(_view_wide(array), (first, last))
                    for (found, array), (_, own) in zip(arrays, packed.columns, strict=True)
                    if own == shape
                ],
                axis=0,
            )
            for shape in packed.shapes
        ]
        copied = [tuple(slabs)]
        if len(run) > 1:
            copied = [
                tuple(
                    concatenate_copy([s[:, :, start - first : stop - first]], axis=2) for s in slabs
                )
                for start, stop in run
            ]
        # Arrays that are not evaluated keep the caches' own buffers alive.
        mx.eval(copied)
        blocks += copied
    return blocks


def append_block(before: Block, after: Block) -> Block:
    """Return an evaluated block with the tokens of both blocks."""
    joined = tuple(mx.concatenate(list(pair), axis=2) for pair in zip(before, after, strict=True))
    mx.eval(joined)
    return joined


def concatenate_copy(arrays: list[Array], *, axis: int) -> Array:
    """Concatenate arrays and always copy, even a single one.

    mx.concatenate returns a view of a single array, and so may mx.contiguous. A view keeps its whole buffer alive.
    """
    nothing = arrays[0][tuple(slice(0 if at == axis else None) for at in range(axis + 1))]
    return mx.concatenate([*arrays, nothing], axis=axis)


def _view_wide(array: Array) -> Array:
    """View rows of whole 8-byte words as uint64: this halves the time to copy float32 (measured on a CPU)."""
    is_whole = array.shape[3] * array.itemsize % 8 == 0
    return array.view(mx.uint64) if is_whole else array


def _group_cuts(cuts: Sequence[Cut], token_bytes: int) -> Iterator[list[Cut]]:
    """Yield runs of adjacent cuts that may be copied at once."""
    run: list[Cut] = []
    for cut in cuts:
        is_next = run and run[-1][1] == cut[0]
        if run and not (is_next and (cut[1] - run[0][0]) * token_bytes <= _SLAB_BYTES):
            yield run
            run = []
        run.append(cut)
    if run:
        yield run


def join_blocks(
    packed: BlockPacking, blocks: Sequence[Block], tokens: Cut
) -> dict[int, list[Array]]:
    """Return each cache's arrays for some of the blocks' tokens, not evaluated; token 0 begins the first block."""
    rows: dict[Shape, Iterator[Array]] = {}
    for number, shape in enumerate(packed.shapes):
        column = _trim_column([block[number] for block in blocks], tokens)
        height, width = column[0].shape[0], tokens[1] - tokens[0]
        step = max(1, _SLAB_BYTES * height // max(1, width * packed.token_bytes))
        rows[shape] = _split_rows(column, height, step, shape[2])
    found: dict[int, list[Array]] = {}
    for at, shape in packed.columns:
        found.setdefault(at, []).append(next(rows[shape]))
    return found


def _trim_column(column: list[Array], tokens: Cut) -> list[Array]:
    """Trim arrays to a token range that begins in the first block and ends in the last one."""
    behind = sum(array.shape[2] for array in column) - tokens[1]
    if behind:
        column[-1] = column[-1][:, :, : column[-1].shape[2] - behind]
    if tokens[0]:
        column[0] = column[0][:, :, tokens[0] :]
    return column


def _split_rows(column: list[Array], height: int, step: int, dtype: Any) -> Iterator[Array]:
    """Yield the rows one by one; every `step` rows are views of one buffer."""
    for low in range(0, height, step):
        parts = column if step >= height else [array[low : low + step] for array in column]
        slab = mx.concatenate(parts, axis=2).view(dtype)
        for row in range(slab.shape[0]):
            yield slab[row : row + 1]


def fill_cache(leaf: LayerCache, arrays: list[Array], offset: int) -> None:
    """Fill an empty cache with arrays of the last tokens before `offset`."""
    keys: Any
    values: Any
    if isinstance(leaf, QuantizedKVCache):
        packed, scales = arrays[0].shape[3], arrays[1].shape[3]
        leaf.group_size = packed * 32 // leaf.bits // scales  # a packed word has 32 bits
        keys, values = tuple(arrays[:3]), tuple(arrays[3:])
    else:
        keys, values = arrays
    leaf.keys, leaf.values, leaf.offset = keys, values, offset
    if isinstance(leaf, RotatingKVCache):
        leaf._idx = arrays[0].shape[2]  # noqa: SLF001 - tokens are in order, the next one goes behind them


def block_bytes(block: Block) -> int:
    """Return the bytes of a block."""
    return sum(array.nbytes for array in block)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ArrayPlace:
    """The place of one array of a state."""

    start: int
    shape: tuple[int, ...]
    dtype: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCopy:
    """A copy of the states of some caches."""

    trees: list[Any]
    """Each cache's `state`, with an _ArrayPlace for each array."""
    arrays: dict[Any, Array]
    """By dtype: all arrays of it, concatenated."""


def copy_states(caches: Sequence[LayerCache]) -> StateCopy:
    """Return evaluated copies of these caches' states, which share no buffers with them."""
    arrays: dict[Any, list[Array]] = {}

    def put(value: Any) -> Any:
        if not isinstance(value, mx.array):
            return value
        row = arrays.setdefault(value.dtype, [])
        row.append(value.reshape(-1))
        start = sum(one.size for one in row[:-1])
        return _ArrayPlace(start=start, shape=tuple(value.shape), dtype=value.dtype)

    trees = [tree_map(put, cache.state) for cache in caches]
    packed = {dtype: concatenate_copy(row, axis=0) for dtype, row in arrays.items()}
    mx.eval(list(packed.values()))
    return StateCopy(trees=trees, arrays=packed)


def restore_states(caches: Sequence[LayerCache], state: StateCopy) -> None:
    """Set the states of caches from a copy."""

    def get(value: Any) -> Any:
        if not isinstance(value, _ArrayPlace):
            return value
        size = math.prod(value.shape)
        flat = state.arrays[value.dtype][value.start : value.start + size]
        return flat.reshape(value.shape)

    for cache, tree in zip(caches, state.trees, strict=True):
        cache.state = tree_map(get, tree)


def pack_tree(value: Any) -> Any:
    """Return a tree of a StateCopy as a value of JSON.

    Raises:
        TypeError: the tree has a value that JSON does not have.

    """
    match value:
        case _ArrayPlace():
            dtype = str(value.dtype).removeprefix("mlx.core.")
            return {"array": [value.start, list(value.shape), dtype]}
        case tuple():
            return {"tuple": [pack_tree(part) for part in value]}
        case list():
            return [pack_tree(part) for part in value]
        case None | bool() | int() | float() | str():
            return value
        case _:
            raise TypeError(f"a state holds {type(value).__name__}")


def unpack_tree(value: Any, arrays: dict[Any, Array]) -> Any:
    """Return the tree of a StateCopy of these arrays, by dtype.

    Raises:
        KeyError, TypeError, ValueError: the value is no such tree, or does not fit the arrays.

    """
    if isinstance(value, list):
        return [unpack_tree(part, arrays) for part in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(unpack_tree(part, arrays) for part in value["tuple"])
    start, shape, name = value["array"]
    dtype = {str(dtype): dtype for dtype in arrays}[f"mlx.core.{name}"]
    size = math.prod(shape)
    if start < 0 or min(shape, default=0) < 0 or start + size > arrays[dtype].size:
        raise ValueError("a state is larger than its arrays")
    return _ArrayPlace(start=start, shape=tuple(shape), dtype=dtype)


def state_bytes(caches: Sequence[LayerCache]) -> int:
    """Return the bytes of the arrays in these caches' states."""
    found = cast("list[tuple[str, Any]]", tree_flatten([cache.state for cache in caches]))
    return sum(array.nbytes for _, array in found if isinstance(array, mx.array))
