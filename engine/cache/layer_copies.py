"""The edge to mlx: copies of some tokens of one sequence's caches, and caches made of such copies.

A layer's cache is one of three things here (nodes.py says what each needs to go on):
- whole: KVCache and QuantizedKVCache, which hold every token;
- a window: RotatingKVCache, of which tokens are taken while they are still there, and put back as many as it looks at;
- a state, copied whole: everything else (recurrent layers, chunked caches, rotating ones that keep their first tokens).
A CacheList is as many caches as it has.

A block is one array for all keys and values of the same shape, (layers and both, heads, tokens, size): Metal allows some
500,000 buffers, which a block of an array per layer would use up.

The edge to mlx for caches that cannot be taken apart by tokens: copies of all they hold, and caches made of such copies.
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
Shape: TypeAlias = tuple[int, int, Any]  # heads, numbers a token, mlx's type of number
Block: TypeAlias = tuple[Array, ...]  # one array for each of a Packing's shapes
Cut: TypeAlias = tuple[int, int]  # first token, and the first one after

# How much is copied at once on the way in and out: copies are made in two steps, and the first one's memory comes on top.
_SLAB_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """Which of a model's caches is what; numbers count the flattened list."""

    whole: tuple[int, ...]
    windows: tuple[tuple[int, tuple[int, ...]], ...]
    """(tokens it looks back, the caches that do)."""
    states: tuple[int, ...]

    @property
    def packed(self) -> tuple[tuple[int, ...], ...]:
        """The caches of each kind that can be taken by tokens: whole, then the windows'."""
        return self.whole, *(caches for _, caches in self.windows)

    def rules(self, block: int) -> BlockRules:
        """Return what its blocks have to obey."""
        windows = tuple(size for size, _ in self.windows)
        return BlockRules(block=block, windows=windows, has_state=bool(self.states))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPacking:
    """Where the arrays of some caches lie in a block."""

    columns: tuple[tuple[int, Shape], ...]
    """(cache, shape), cache by cache; those of one shape are the rows of one array, in this order."""
    shapes: tuple[Shape, ...]
    token_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRows:
    """One layer's arrays, (1, heads, places, size) each, and which token is at which place."""

    arrays: tuple[Array, ...]
    spans: tuple[tuple[int, int, int], ...]
    """(first token, its place, how many); one follows the other."""

    @property
    def start(self) -> int:
        """The first token that is still there."""
        return self.spans[0][0]

    @property
    def stop(self) -> int:
        """How many tokens it has read."""
        token, _, count = self.spans[-1]
        return token + count

    def take(self, array: Array, cut: Cut) -> Array:
        """Return a view of some tokens of one of the arrays."""
        pieces = []
        for token, place, count in self.spans:
            first, last = max(cut[0], token), min(cut[1], token + count)
            if first < last:
                pieces.append(array[..., place + first - token : place + last - token, :])
        return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=2)


def flatten_caches(caches: Sequence[LayerCache]) -> list[LayerCache]:
    """Return the caches without the lists around them."""
    found: list[LayerCache] = []
    for cache in caches:
        found += flatten_caches(cache.caches) if isinstance(cache, CacheList) else [cache]
    return found


def find_layout(caches: Sequence[LayerCache]) -> CacheLayout:
    """Return what kinds of caches these are."""
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
    """Return what a cache holds that can be taken by tokens; None before the first one."""
    if leaf.keys is None or not leaf.offset:
        return None
    keys, values, end = leaf.keys, leaf.values, leaf.offset
    if isinstance(leaf, QuantizedKVCache):
        return CacheRows(arrays=(*keys, *values), spans=((0, 0, end),))
    arrays = (keys, values)
    if not isinstance(leaf, RotatingKVCache):
        return CacheRows(arrays=arrays, spans=((0, 0, end),))
    places, at = leaf.keys.shape[2], leaf._idx  # noqa: SLF001 - where the next token goes; `state` has it, too
    if at >= min(end, places):
        return CacheRows(arrays=arrays, spans=((end - at, 0, at),))
    # It went round: the oldest token is where the next one goes.
    return CacheRows(arrays=arrays, spans=((end - places, at, places - at), (end - at, 0, at)))


def find_packing(held: dict[int, CacheRows]) -> BlockPacking:
    """Return where the arrays of these caches (by their numbers) go."""
    arrays = [(at, array) for at, found in held.items() for array in found.arrays]
    columns = tuple((at, (a.shape[1], a.shape[3], a.dtype)) for at, a in arrays)
    size = sum(array.shape[1] * array.shape[3] * array.itemsize for _, array in arrays)
    shapes = tuple(dict.fromkeys(shape for _, shape in columns))
    return BlockPacking(columns=columns, shapes=shapes, token_bytes=size)


def copy_blocks(
    held: dict[int, CacheRows], packed: BlockPacking, cuts: Sequence[Cut]
) -> list[Block]:
    """Return copies of these tokens, evaluated, in the same order; cuts rise, and may leave tokens out."""
    arrays = [(found, array) for found in held.values() for array in found.arrays]
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
        made = [tuple(slabs)]
        if len(run) > 1:
            made = [
                tuple(
                    concatenate_copy([s[:, :, start - first : stop - first]], axis=2) for s in slabs
                )
                for start, stop in run
            ]
        # What is not evaluated keeps the caches' own buffers alive.
        mx.eval(made)
        blocks += made
    return blocks


def append_block(before: Block, after: Block) -> Block:
    """Return a block of two blocks' tokens, evaluated."""
    made = tuple(mx.concatenate(list(pair), axis=2) for pair in zip(before, after, strict=True))
    mx.eval(made)
    return made


def concatenate_copy(arrays: list[Array], *, axis: int) -> Array:
    """Return a copy in any case: of one array, mx.concatenate returns a view, and so may mx.contiguous.

    A view keeps the whole buffer alive that it looks at.
    """
    nothing = arrays[0][tuple(slice(0 if at == axis else None) for at in range(axis + 1))]
    return mx.concatenate([*arrays, nothing], axis=axis)


def _view_wide(array: Array) -> Array:
    """Return the same bytes as numbers of 8 bytes, if they fill them: half the time to copy float32 (seen on a CPU)."""
    is_whole = array.shape[3] * array.itemsize % 8 == 0
    return array.view(mx.uint64) if is_whole else array


def _group_cuts(cuts: Sequence[Cut], token_bytes: int) -> Iterator[list[Cut]]:
    """Yield cuts that follow each other, as many as may be copied at once."""
    run: list[Cut] = []
    for one in cuts:
        is_next = run and run[-1][1] == one[0]
        if run and not (is_next and (one[1] - run[0][0]) * token_bytes <= _SLAB_BYTES):
            yield run
            run = []
        run.append(one)
    if run:
        yield run


def join_blocks(
    packed: BlockPacking, blocks: Sequence[Block], tokens: Cut
) -> dict[int, list[Array]]:
    """Return each cache's arrays, of some of the blocks' tokens (0 is the first block's first one); not evaluated."""
    made: dict[Shape, Iterator[Array]] = {}
    for number, shape in enumerate(packed.shapes):
        column = _trim_column([block[number] for block in blocks], tokens)
        height, width = column[0].shape[0], tokens[1] - tokens[0]
        step = max(1, _SLAB_BYTES * height // max(1, width * packed.token_bytes))
        made[shape] = _split_rows(column, height, step, shape[2])
    found: dict[int, list[Array]] = {}
    for at, shape in packed.columns:
        found.setdefault(at, []).append(next(made[shape]))
    return found


def _trim_column(column: list[Array], tokens: Cut) -> list[Array]:
    """Leave out what is before and after some tokens; they begin in the first block and end in the last."""
    behind = sum(array.shape[2] for array in column) - tokens[1]
    if behind:
        column[-1] = column[-1][:, :, : column[-1].shape[2] - behind]
    if tokens[0]:
        column[0] = column[0][:, :, tokens[0] :]
    return column


def _split_rows(column: list[Array], height: int, step: int, dtype: Any) -> Iterator[Array]:
    """Yield the rows one by one, `step` of them views of one buffer."""
    for low in range(0, height, step):
        parts = column if step >= height else [array[low : low + step] for array in column]
        slab = mx.concatenate(parts, axis=2).view(dtype)
        for row in range(slab.shape[0]):
            yield slab[row : row + 1]


def fill_cache(leaf: LayerCache, arrays: list[Array], offset: int) -> None:
    """Let an empty cache hold these arrays of the last tokens before `offset`."""
    keys: Any
    values: Any
    if isinstance(leaf, QuantizedKVCache):
        packed, scales = arrays[0].shape[3], arrays[1].shape[3]
        leaf.group_size = packed * 32 // leaf.bits // scales  # 32 bits a packed number
        keys, values = tuple(arrays[:3]), tuple(arrays[3:])
    else:
        keys, values = arrays
    leaf.keys, leaf.values, leaf.offset = keys, values, offset
    if isinstance(leaf, RotatingKVCache):
        leaf._idx = arrays[0].shape[2]  # noqa: SLF001 - in order, and the next token goes behind them


def block_bytes(block: Block) -> int:
    """Return what a block weighs."""
    return sum(array.nbytes for array in block)


# mlx ships no types


@dataclass(frozen=True, slots=True, kw_only=True)
class _ArrayPlace:
    """Where an array of a state lies."""

    start: int
    shape: tuple[int, ...]
    dtype: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCopy:
    """What some caches had at one time."""

    trees: list[Any]
    """Each cache's `state`, with a _Place for each array."""
    arrays: dict[Any, Array]
    """All arrays of a type behind each other."""


def copy_states(caches: Sequence[LayerCache]) -> StateCopy:
    """Return copies of what these hold; evaluated, and nothing of the caches' own buffers."""
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
    """Let caches hold what others had."""

    def get(value: Any) -> Any:
        if not isinstance(value, _ArrayPlace):
            return value
        size = math.prod(value.shape)
        flat = state.arrays[value.dtype][value.start : value.start + size]
        return flat.reshape(value.shape)

    for cache, tree in zip(caches, state.trees, strict=True):
        cache.state = tree_map(get, tree)


def state_bytes(caches: Sequence[LayerCache]) -> int:
    """Return what the arrays in these weigh."""
    found = cast("list[tuple[str, Any]]", tree_flatten([cache.state for cache in caches]))
    return sum(array.nbytes for _, array in found if isinstance(array, mx.array))
