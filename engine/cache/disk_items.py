"""Names of the files of a block's values, and the longest run of them that continues a prompt. No mlx.

A block's own values have the name of its chain (block_files.py). Values of a window and states have names derived from
it, so a lookup reads the windows and the state at its end only. A tail has files if a prompt of a model with windows or
states ended there. A prompt that is shorter than a block has none: to read it takes a model less time than its files.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from engine.cache.block_tree import TOKEN_BYTES, BlockNode, BlockRules

Slot = int | None  # an index of `BlockNode.extras`; None for the block's own values


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskBlock:
    """A block of a prompt, on disk or in memory."""

    start: int
    stop: int
    """The first token after the block."""
    key: str
    node: BlockNode | None
    """The block in memory, if it is there."""


def item_key(key: str, slot: Slot) -> str:
    """Return the file name of a block's values of one kind."""
    if slot is None:
        return key
    return hashlib.blake2b(f"{key} {slot}".encode(), digest_size=32).hexdigest()


def tail_key(parent: str, tokens: bytes) -> str:
    """Return the name of a block that is shorter than others: a hash of its parent's name and its tokens."""
    return hashlib.blake2b(bytes.fromhex(parent) + tokens, digest_size=32).hexdigest()


def needed_slots(block: DiskBlock, end: int, rules: BlockRules) -> list[int]:
    """Return the kinds of values, beside its own, that a block must have for a model to continue at `end`."""
    windows = [kind for kind, size in enumerate(rules.windows) if block.stop > end - size]
    return [*windows, *([len(rules.windows)] if rules.has_state and block.stop == end else [])]


def find_run(
    blocks: Sequence[DiskBlock], tokens: bytes, rules: BlockRules, has_file: Callable[[str], bool]
) -> list[DiskBlock]:
    """Return the longest run of blocks whose needed values are on disk or in memory; `blocks` are the full ones.

    `tokens` may go on behind the full blocks. Takes at most one hash a token.
    """

    def holds(block: DiskBlock, slot: Slot) -> bool:
        node = block.node
        item = None if node is None else node.own if slot is None else node.extras[slot]
        return item is not None or has_file(item_key(block.key, slot))

    depth = next((at for at, block in enumerate(blocks) if not holds(block, None)), len(blocks))
    for count in range(depth, 0, -1):
        for run in _runs(blocks[:count], tokens, rules, has_file):
            end = run[-1].stop
            nearest = [block for block in run[-_reach(rules) :] if needed_slots(block, end, rules)]
            if all(
                holds(block, slot) for block in nearest for slot in needed_slots(block, end, rules)
            ):
                return run
    return []


def _reach(rules: BlockRules) -> int:
    """Return the number of last blocks that may need more than their own values."""
    return 2 + max(rules.windows, default=0) // rules.block


def _runs(
    blocks: Sequence[DiskBlock], tokens: bytes, rules: BlockRules, has_file: Callable[[str], bool]
) -> Iterator[list[DiskBlock]]:
    """Yield these blocks with each tail behind them that is on disk, the longest first; then without one."""
    last = blocks[-1]
    rest = tokens[last.stop * TOKEN_BYTES : (last.stop + rules.block - 1) * TOKEN_BYTES]
    for size in range(len(rest), 0, -TOKEN_BYTES) if rules.kinds else ():
        key = tail_key(last.key, rest[:size])
        if has_file(key):
            stop = last.stop + size // TOKEN_BYTES
            yield [*blocks, DiskBlock(start=last.stop, stop=stop, key=key, node=None)]
    yield list(blocks)
