"""Copy plan: the parts of a sequence that the prefix cache does not hold yet. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.cache.block_tree import BlockNode, BlockRules, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCopy:
    """The tokens to copy for one kind of layers: kind 0 needs every token, kind 1 is the first window, and so on."""

    kind: int
    first: int
    """The first token to copy; the last one is the last of the block."""
    since: int
    """The first token that is item after the copy: `first`, or the first token of `before`."""
    before: Value | None = None
    """The value that is item already for the tokens from `since` to `first`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """A block that is not item, or one that has lost values of some windows."""

    start: int
    stop: int
    """The first token after the block."""
    node: BlockNode | None
    """None for a new block."""
    parts: tuple[LayerCopy, ...]


def plan_copies(
    path: Sequence[BlockNode],
    tail: BlockNode | None,
    end: int,
    starts: Sequence[int],
    rules: BlockRules,
) -> list[BlockCopy]:
    """Return the copies after which the first `end` tokens are item, as far as the layers still have them.

    `path` are the nodes that exist for these tokens, and `tail` is the node behind it with which the next block begins.
    `starts` is the first token that the layers of each window still have.
    """
    block_copies: list[BlockCopy] = []
    for node in path:
        lost = [_lost_window(kind, start, node) for kind, start in enumerate(starts, 1)]
        parts = tuple(part for part in lost if part is not None)
        if parts and node.end <= end:
            block_copies.append(BlockCopy(start=node.start, stop=node.end, node=node, parts=parts))
    for first in range(path[-1].end if path else 0, end, rules.block):
        stop = min(first + rules.block, end)
        new = [_new_block(kind, max(first, at), stop, tail) for kind, at in enumerate((0, *starts))]
        parts = tuple(part for part in new if part is not None)
        block_copies.append(BlockCopy(start=first, stop=stop, node=None, parts=parts))
        tail = None
    return block_copies


def _lost_window(kind: int, start: int, node: BlockNode) -> LayerCopy | None:
    """Return the copy for a window of which the layers have more tokens than the node."""
    item = node.extras[kind - 1]
    first = max(node.start, start)
    is_less = first < (node.end if item is None else item.first)
    return LayerCopy(kind=kind, first=first, since=first) if is_less else None


def _new_block(kind: int, first: int, stop: int, tail: BlockNode | None) -> LayerCopy | None:
    """Return the copy of a new block whose tokens the layers have from `first` to `stop`."""
    if tail is not None:
        item = tail.extras[kind - 1] if kind else tail.own
        if item is not None and item.first <= first <= tail.end:
            return LayerCopy(kind=kind, first=tail.end, since=item.first, before=item.value)
    return LayerCopy(kind=kind, first=first, since=first) if first < stop else None
