"""Tokens as bytes: fast to compare, to look up and to hash. Pure.

The tree of blocks: what a node is. Pure: what is held is opaque here, and no mlx.

A node stands for the tokens of its block and all those before it; a full one has exactly `Rules.block` of them, a
shorter one (a tail) has no children. Layers differ in what they keep, and in what has to be there to go on from a position:
- `own`: of layers that look at every token before. Any part of a block can be used.
- a window: of layers that look back `size` tokens. These must be there; the ones before may be gone.
- a state: of layers that have one value for all tokens up to the node's end, and can go on from there only.

How far a prompt is known: walks down the tree of blocks, in time linear in the prompt's length. Pure; changes nothing.

The tree of blocks, what it weighs, and what is forgotten first. Pure: what is held is opaque here, and no mlx.

Forgotten first is what was not used for longest. A path is used from its end to its beginning, so that a node is
always younger than those below it: leaves go first, and nobody has to look for them.
"""

import hashlib
from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from engine.cache.interface import BLOCK_TOKENS

TOKEN_BYTES = 4


def encode_tokens(tokens: Sequence[int]) -> bytes:
    """Return tokens as little-endian uint32, the order of bytes of every machine that MLX runs on."""
    return array("I", tokens).tobytes()


def block_hash(parent: bytes, tokens: bytes) -> bytes:
    """Return the name of a full block: BLAKE2b of 8 bytes over its parent's name, if it has one, and its tokens."""
    return hashlib.blake2b(parent + tokens, digest_size=8).digest()


def count_common(one: bytes, other: bytes) -> int:
    """Return how many tokens both begin with."""
    size = min(len(one), len(other))
    differ = int.from_bytes(one[:size], "little") ^ int.from_bytes(other[:size], "little")
    if not differ:
        return size // TOKEN_BYTES
    # The lowest bit that differs; a byte has 8.
    return ((differ & -differ).bit_length() - 1) // (8 * TOKEN_BYTES)


Value: TypeAlias = Any  # whatever the caller holds


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRules:
    """What a model's layers need."""

    block: int = BLOCK_TOKENS
    """Tokens."""
    windows: tuple[int, ...] = ()
    """How many tokens each kind of window layer looks back."""
    has_state: bool = False

    @property
    def kinds(self) -> int:
        """How many things a node may hold besides `own`: the windows', then the state."""
        return len(self.windows) + self.has_state


class CacheItem:
    """One thing that can be forgotten: a node with all it has, or what its layers of one kind keep."""

    __slots__ = ("first", "nbytes", "node", "slot", "used", "value")

    def __init__(
        self, node: "BlockNode", slot: int | None, value: Value, nbytes: int, *, first: int
    ) -> None:
        self.node = node
        self.slot = slot  # in `extras`; None: the node itself
        self.value = value
        self.first = first  # the token from which on the layers' are there, up to the node's end
        self.nbytes = nbytes
        self.used = 0  # the turn in which it was


class BlockNode:
    """A block of tokens after those of its parents."""

    __slots__ = ("children", "end", "extras", "key", "order", "own", "parent", "tails", "tokens")

    def __init__(self, parent: "BlockNode | None", tokens: bytes, rules: BlockRules) -> None:
        count = len(tokens) // TOKEN_BYTES
        self.parent = parent
        self.tokens = tokens
        self.end: int = count if parent is None else parent.end + count
        """How many tokens there are up to its last one."""
        is_full = parent is not None and count == rules.block
        self.key: bytes = block_hash(parent.key, tokens) if parent is not None and is_full else b""
        """The name of a full block; nothing for a tail."""
        self.children: dict[bytes, BlockNode] = {}
        self.order: list[bytes] = []
        """The children's tokens, sorted: what shares most with a word stands beside the word's place."""
        self.tails = 0
        """How many of the children are shorter than a block."""
        self.own: CacheItem | None = None
        self.extras: list[CacheItem | None] = [None] * rules.kinds

    @property
    def start(self) -> int:
        """How many tokens there are before its first one."""
        return self.end - len(self.tokens) // TOKEN_BYTES

    @property
    def nbytes(self) -> int:
        """What would be free without it."""
        return sum(held.nbytes for held in (self.own, *self.extras) if held is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """Nodes from the first block on, and how many tokens of them can be used: all, or not all of the last one."""

    path: tuple[BlockNode, ...] = ()
    length: int = 0


def find_match(root: BlockNode, tokens: bytes, rules: BlockRules, *, limit: int) -> PrefixMatch:
    """Return the longest run of at most `limit` of these tokens from which a model can go on.

    It is the longest there is, but for one case: of several children that begin with a part of the next block, the
    two nearest are looked at, and with windows a third may have kept what these have lost.
    """
    path: list[BlockNode] = []
    gaps = [0] * len(rules.windows)  # up to which token something of each window is missing
    node, best, depth = root, 0, 0
    side: BlockNode | None = None  # the last node, if it is not one of the path
    while True:
        tail = _tail(node, tokens, rules, limit, gaps)
        if tail is not None:
            best, depth, side = tail.end, len(path), tail
        child = _next(node, tokens, rules)
        if child is None or child.end > limit:
            break
        path.append(child)
        if _is_usable(child, child.end, rules, gaps):
            best, depth, side = child.end, len(path), None
        gaps = _gaps(child, child.end, gaps)
        node = child
    for child, length in _similar(node, tokens, rules, limit):
        if length > best and _is_usable(child, length, rules, gaps):
            best, depth, side = length, len(path), child
    return PrefixMatch(path=(*path[:depth], *([] if side is None else [side])), length=best)


def walk_path(root: BlockNode, tokens: bytes, rules: BlockRules) -> list[BlockNode]:
    """Return the nodes that stand for these tokens, as far as there are any; the last may go beyond them."""
    path: list[BlockNode] = []
    node = root
    while (child := _next(node, tokens, rules)) is not None:
        path.append(child)
        node = child
    rest = tokens[node.end * TOKEN_BYTES :]
    if not rest or len(rest) >= rules.block * TOKEN_BYTES:
        return path
    at = bisect_left(node.order, rest)
    if at == len(node.order) or not node.order[at].startswith(rest):
        return path
    # One can go on from a state at its node's end only, so that a longer block does not stand for a shorter one.
    if len(node.order[at]) == len(rest) or not rules.has_state:
        path.append(node.children[node.order[at]])
    return path


def find_partial_block(node: BlockNode, tokens: bytes) -> BlockNode | None:
    """Return the longest tail below a node that these tokens begin with and go on after."""
    if not node.tails:
        return None
    for size in range(len(tokens) - TOKEN_BYTES, 0, -TOKEN_BYTES):
        child = node.children.get(tokens[:size])
        if child is not None:
            return child
    return None


def _next(node: BlockNode, tokens: bytes, rules: BlockRules) -> BlockNode | None:
    start = node.end * TOKEN_BYTES
    found = node.children.get(tokens[start : start + rules.block * TOKEN_BYTES])
    return found if found is not None and found.key else None


def _gaps(node: BlockNode, end: int, before: Sequence[int]) -> list[int]:
    """Return up to which token, of those to `end` in `node`, something of each window is missing; 0 if nothing is."""
    return [
        end if held is None else gap if held.first == node.start else held.first
        for gap, held in zip(before, node.extras, strict=False)
    ]


def _is_usable(node: BlockNode, end: int, rules: BlockRules, before: Sequence[int]) -> bool:
    """Say whether a model can go on from `end`, which lies in `node`; `before` are the gaps of its parents."""
    for size, gap in zip(rules.windows, _gaps(node, end, before), strict=True):
        if gap and end - size < gap:
            return False
    return not rules.has_state or (end == node.end and node.extras[-1] is not None)


def _tail(
    node: BlockNode, tokens: bytes, rules: BlockRules, limit: int, gaps: Sequence[int]
) -> BlockNode | None:
    """Return the longest tail below a node that is wholly in these tokens, and from whose state one can go on."""
    if not node.tails or not rules.has_state:
        return None
    start = node.end * TOKEN_BYTES
    rest = tokens[start : start + (rules.block - 1) * TOKEN_BYTES]
    for count in range(min(len(rest) // TOKEN_BYTES, limit - node.end), 0, -1):
        child = node.children.get(rest[: count * TOKEN_BYTES])
        if child is not None and _is_usable(child, child.end, rules, gaps):
            return child
    return None


def _similar(
    node: BlockNode, tokens: bytes, rules: BlockRules, limit: int
) -> Iterator[tuple[BlockNode, int]]:
    """Yield the children that share most of what comes next, and up to which token they do."""
    if rules.has_state:
        return
    start = node.end * TOKEN_BYTES
    rest = tokens[start : start + rules.block * TOKEN_BYTES]
    at = bisect_left(node.order, rest)
    for held in node.order[max(0, at - 1) : at + 1]:
        shared = min(count_common(held, rest), limit - node.end)
        if shared > 0:
            yield node.children[held], node.end + shared


# A node's own weight, rounded up (tracemalloc: 1.0 to 1.3 kB for 64 tokens, without mlx's objects). It counts, so that
# nodes whose layers keep nothing any more cannot pile up for ever.
NODE_BYTES = 2048


class BlockTree:
    """What is held, by the tokens it belongs to."""

    def __init__(self, rules: BlockRules, *, limit_bytes: int) -> None:
        self.rules = rules
        self.limit_bytes = limit_bytes
        self.nbytes = 0
        self.entries = 0
        self.evictions = 0
        """How often something was forgotten for want of room."""
        self.root = BlockNode(None, b"", rules)
        self._uses: OrderedDict[CacheItem, None] = OrderedDict()  # the longest unused first
        self._turn = 0  # counts what touches: a clock that is the same on every rank

    def match(self, tokens: bytes, *, limit: int) -> PrefixMatch:
        """Return the longest run of at most `limit` of these tokens from which a model can go on."""
        return find_match(self.root, tokens, self.rules, limit=limit)

    def walk(self, tokens: bytes) -> list[BlockNode]:
        """Return the nodes that stand for these tokens, as far as there are any; the last may go beyond them."""
        return walk_path(self.root, tokens, self.rules)

    def beginning(self, path: Sequence[BlockNode], tokens: bytes) -> BlockNode | None:
        """Return the tail behind a path of full blocks that begins the next block of these tokens."""
        node = path[-1] if path else self.root
        start = node.end * TOKEN_BYTES
        return find_partial_block(node, tokens[start : start + self.rules.block * TOKEN_BYTES])

    def touch(self, path: Sequence[BlockNode], end: int) -> None:
        """Say that a path is used now up to the token `end`; of windows and states, what one needs to go on there."""
        self._turn += 1
        windows = self.rules.windows
        for node in reversed(path):
            for kind, held in enumerate(node.extras):
                is_near = kind < len(windows) and node.end > end - windows[kind]
                if held is not None and (is_near or node.end == end):
                    self._use(held)
            if node.own is not None:
                self._use(node.own)

    def room(self, sizes: Sequence[int]) -> int:
        """Forget, but nothing of the last touch or after it, until these sizes fit; return how many of them do."""
        wanted = 0
        for count, size in enumerate(sizes):
            wanted += size
            while self.nbytes + wanted > self.limit_bytes:
                oldest = next(iter(self._uses), None)
                if oldest is None or oldest.used == self._turn:
                    return count
                self._forget(oldest)
        return len(sizes)

    def add(self, parent: BlockNode, tokens: bytes, value: Value, nbytes: int) -> BlockNode:
        """Hold a block below `parent`, instead of a tail that it begins with. Touch its whole path afterwards."""
        tail = find_partial_block(parent, tokens)
        # One can go on from a state at its tail's end only; anything else the new block has, too.
        if tail is not None and not (self.rules.has_state and tail.extras[-1]):
            self._drop(tail)
        node = BlockNode(parent, tokens, self.rules)
        node.own = CacheItem(node, None, value, nbytes + NODE_BYTES, first=node.start)
        parent.children[tokens] = node
        insort(parent.order, tokens)
        parent.tails += not node.key
        self.entries += 1
        self._hold(node.own)
        return node

    def attach(self, node: BlockNode, slot: int, value: Value, nbytes: int, *, first: int) -> None:
        """Hold what the layers of one kind keep of a node's tokens from `first` on; `slot` is the kind's in `extras`."""
        old = node.extras[slot]
        if old is not None:
            self._release(old)
        held = CacheItem(node, slot, value, nbytes, first=first)
        node.extras[slot] = held
        self._hold(held)

    def trim(self, limit_bytes: int) -> None:
        """Forget until no more than this is held."""
        while self.nbytes > limit_bytes and self._uses:
            self._forget(next(iter(self._uses)))

    def recent(self) -> Iterator[BlockNode]:
        """Yield the nodes, the last used first; a node before those below it."""
        return (held.node for held in reversed(self._uses) if held.slot is None)

    def _use(self, held: CacheItem) -> None:
        held.used = self._turn
        self._uses.move_to_end(held)

    def _hold(self, held: CacheItem) -> None:
        held.used = self._turn
        self._uses[held] = None
        self.nbytes += held.nbytes

    def _forget(self, held: CacheItem) -> None:
        self.evictions += 1
        if held.slot is None:
            self._drop(held.node)
            return
        held.node.extras[held.slot] = None
        self._release(held)

    def _drop(self, node: BlockNode) -> None:
        assert node.parent is not None
        parent, node.parent = node.parent, None
        del parent.children[node.tokens]
        del parent.order[bisect_left(parent.order, node.tokens)]
        parent.tails -= not node.key
        self.entries -= 1
        for held in (node.own, *node.extras):
            if held is not None:
                self._release(held)

    def _release(self, held: CacheItem) -> None:
        del self._uses[held]
        self.nbytes -= held.nbytes
        # Nodes and what they hold point at each other: arrays would live until the next garbage collection.
        held.value = None
