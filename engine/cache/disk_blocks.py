"""Blocks of MLX arrays as files, and back. Worker thread only; block_files.py knows the folder."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from engine.cache.block_files import BlockFiles, FileContent, chain_keys
from engine.cache.block_tree import TOKEN_BYTES
from engine.cache.layer_copies import (
    Block,
    BlockPacking,
    StateCopy,
    block_bytes,
    pack_tree,
    unpack_tree,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDisk:
    """The blocks of one model on disk."""

    files: BlockFiles
    model: str
    """A name for everything that keys and values depend on besides tokens and salt."""

    def keys(self, salt: str, tokens: bytes, block: int) -> list[str]:
        """Return the names of the full blocks of these tokens."""
        return list(chain_keys(self.model, salt, tokens, block * TOKEN_BYTES))

    def offer(self, key: str, packing: BlockPacking, block: Block) -> bool:
        """Queue a block to be written, or drop it."""
        header = {
            "columns": [[at, [*shape[:2], _name(shape[2])]] for at, shape in packing.columns],
            "arrays": _describe(block),
        }
        return self.files.offer(key, header, block_bytes(block), lambda: _copy_bytes(block))

    def offer_state(self, key: str, state: StateCopy) -> bool:
        """Queue a state to be written, or drop it; one with values that JSON does not have is dropped, too."""
        arrays = tuple(state.arrays.values())
        try:
            trees = pack_tree(state.trees)
        except TypeError:
            return False
        header = {"trees": trees, "arrays": _describe(arrays)}
        return self.files.offer(key, header, block_bytes(arrays), lambda: _copy_bytes(arrays))

    def read_state(self, key: str, caches: int) -> StateCopy | None:
        """Return the state of so many caches; None if there is none. One that does not fit is deleted."""
        content = self.files.read(key)
        if content is None:
            return None
        try:
            arrays = {array.dtype: array for array in _parse_arrays(content)}
            trees = unpack_tree(content.header["trees"], arrays)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            self.files.discard(key)
            return None
        if not isinstance(trees, list) or len(trees) != caches:
            self.files.discard(key)
            return None
        self.files.stats.read += 1
        return StateCopy(trees=trees, arrays=arrays)

    def read(
        self, key: str, caches: tuple[int, ...], tokens: range, packing: BlockPacking | None
    ) -> tuple[BlockPacking, Block] | None:
        """Return a block of these caches whose number of tokens is in `tokens`; None if there is none.

        A file that does not fit is deleted.
        """
        content = self.files.read(key)
        if content is None:
            return None
        try:
            block_packing, block = _parse_block(content)
        except (KeyError, TypeError, ValueError, AttributeError):
            self.files.discard(key)
            return None
        fits = packing is None or block_packing == packing
        is_whole = {at for at, _ in block_packing.columns} == set(caches)
        lengths = {array.shape[2] for array in block}
        if not (fits and is_whole and len(lengths) <= 1 and all(n in tokens for n in lengths)):
            self.files.discard(key)
            return None
        self.files.stats.read += 1
        return block_packing, block


def _copy_bytes(block: Block) -> Sequence[memoryview]:
    """Return the bytes of evaluated arrays, which stay in memory until they are written."""
    return [memoryview(array.reshape(-1).view(mx.uint8)) for array in block]


def _describe(arrays: Sequence[Any]) -> list[Any]:
    return [[list(array.shape), _name(array.dtype)] for array in arrays]


def _parse_block(content: FileContent) -> tuple[BlockPacking, Block]:
    columns = tuple(
        (int(at), (int(heads), int(size), _dtype(name)))
        for at, (heads, size, name) in content.header["columns"]
    )
    arrays = _parse_arrays(content)
    packing = BlockPacking(
        columns=columns,
        shapes=tuple(dict.fromkeys(shape for _, shape in columns)),
        token_bytes=sum(heads * size * dtype.size for _, (heads, size, dtype) in columns),
    )
    return packing, tuple(arrays)


def _parse_arrays(content: FileContent) -> list[Any]:
    start = 0
    arrays = []
    for shape, name in content.header["arrays"]:
        dtype = _dtype(name)
        stop = start + math.prod(shape) * dtype.size
        raw = np.frombuffer(content.values[start:stop], np.uint8)
        arrays.append(mx.array(raw).view(dtype).reshape(shape))
        start = stop
    if start != len(content.values):
        raise ValueError("arrays differ in size from its header")
    mx.eval(arrays)
    return arrays


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _dtype(name: str) -> Any:
    dtype = getattr(mx, name)
    if not isinstance(dtype, mx.Dtype):
        raise TypeError(f"{name} is no type of numbers")
    return dtype
