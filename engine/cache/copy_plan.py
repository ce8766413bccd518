"""What of a sequence is not held yet. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.cache.block_tree import BlockNode, BlockRules, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCopy:
    """What to copy for one kind of layers: 0 those that need every token, 1 those of the first window, and so on."""

    kind: int
    first: int
    """The first token to copy, up to the piece's end."""
    since: int
    """The first token that is held then: `first`, or that of `before`."""
    before: Value | None = None
    """What is held of the tokens from `since` to `first`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """A block that is not held, or one that has lost what some windows need."""

    start: int
    stop: int
    """The first token after it."""
    node: BlockNode | None
    """None: a new block."""
    parts: tuple[LayerCopy, ...]


def plan_copies(
    path: Sequence[BlockNode],
    tail: BlockNode | None,
    end: int,
    starts: Sequence[int],
    rules: BlockRules,
) -> list[BlockCopy]:
    """Return what to copy so that all of the first `end` tokens are held, as far as layers still have them.

    `path` are the nodes there are for them, `tail` the one behind it that begins the next block; `starts` is the first token
    that the layers of each window still have.
    """
    found: list[BlockCopy] = []
    for node in path:
        lost = [_lost_window(kind, start, node) for kind, start in enumerate(starts, 1)]
        parts = tuple(part for part in lost if part is not None)
        if parts and node.end <= end:
            found.append(BlockCopy(start=node.start, stop=node.end, node=node, parts=parts))
    for first in range(path[-1].end if path else 0, end, rules.block):
        stop = min(first + rules.block, end)
        new = [_new_block(kind, max(first, at), stop, tail) for kind, at in enumerate((0, *starts))]
        parts = tuple(part for part in new if part is not None)
        found.append(BlockCopy(start=first, stop=stop, node=None, parts=parts))
        tail = None
    return found


def _lost_window(kind: int, start: int, node: BlockNode) -> LayerCopy | None:
    """Return what to copy for a window of a node that has less of it than the layers."""
    held = node.extras[kind - 1]
    first = max(node.start, start)
    is_less = first < (node.end if held is None else held.first)
    return LayerCopy(kind=kind, first=first, since=first) if is_less else None


def _new_block(kind: int, first: int, stop: int, tail: BlockNode | None) -> LayerCopy | None:
    """Return what to copy of a block whose tokens the layers have from `first` to `stop`."""
    if tail is not None:
        held = tail.extras[kind - 1] if kind else tail.own
        if held is not None and held.first <= first <= tail.end:
            return LayerCopy(kind=kind, first=tail.end, since=held.first, before=held.value)
    return LayerCopy(kind=kind, first=first, since=first) if first < stop else None
