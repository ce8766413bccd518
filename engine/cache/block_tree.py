"""The prefix cache's tree of token blocks: lookup, size accounting and LRU eviction. Pure: no mlx, opaque values.

A node stands for the tokens of its block and of all blocks before it. Each salt has a tree of its own, so that prompts
with different salts share nothing; all trees share one limit and one order of eviction. A full block has exactly `BlockRules.block`
tokens; a shorter one (a tail) has no children. Layers differ in the values that they keep, and in those that must be
present to continue from a position:
- `own`: values of layers that attend to every earlier token. Any part of a block can be used.
- a window: values of layers that look back `size` tokens. These must be present; earlier ones may be missing.
- a state: layers with one value for all tokens up to the node's end. They can continue from there only.

Eviction removes the least recently used item. A path is touched from its end to its beginning, so a node is always
younger than the nodes below it: leaves are evicted first, without a search.
"""

import hashlib
from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import Any, TypeAlias

from engine.cache.interface import BLOCK_TOKENS

TOKEN_BYTES = 4
# The size of a node itself, rounded up (tracemalloc: 1.0 to 1.3 kB for 64 tokens, without mlx's objects). It counts
# towards the limit, so that nodes without values cannot pile up.
NODE_BYTES = 2048


def encode_tokens(tokens: Sequence[int]) -> bytes:
    """Return tokens as little-endian uint32, the byte order of every machine that MLX runs on."""
    return array("I", tokens).tobytes()


def block_hash(parent: bytes, tokens: bytes) -> bytes:
    """Return the name of a full block: 8 bytes of BLAKE2b over its parent's name (`salt_key` at a root) and its tokens."""
    return hashlib.blake2b(parent + tokens, digest_size=8).digest()


def salt_key(salt: str) -> bytes:
    """Return the parent's name of a salt's first blocks: 16 bytes of BLAKE2b; b"" without a salt."""
    return hashlib.blake2b(salt.encode(), digest_size=16).digest() if salt else b""


def count_common(one: bytes, other: bytes) -> int:
    """Return the number of tokens that both sequences begin with."""
    size = min(len(one), len(other))
    differ = int.from_bytes(one[:size], "little") ^ int.from_bytes(other[:size], "little")
    if not differ:
        return size // TOKEN_BYTES
    # The lowest differing bit; a byte has 8.
    return ((differ & -differ).bit_length() - 1) // (8 * TOKEN_BYTES)


Value: TypeAlias = Any  # opaque: the caller's value


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRules:
    """The needs of a model's layers."""

    block: int = BLOCK_TOKENS
    """Tokens of a full block."""
    windows: tuple[int, ...] = ()
    """The number of tokens that each kind of window layer looks back."""
    has_state: bool = False
    """True if any layer has a state."""

    @property
    def kinds(self) -> int:
        """Number of items that a node may hold besides `own`: one a window, then the state."""
        return len(self.windows) + self.has_state


class CacheItem:
    """One item that can be evicted: a node with all its values, or its layers' values of one kind."""

    __slots__ = ("first", "nbytes", "node", "slot", "used", "value")

    def __init__(
        self, node: "BlockNode", slot: int | None, value: Value, nbytes: int, *, first: int
    ) -> None:
        self.node = node
        self.slot = slot  # index in `extras`; None for the node itself
        self.value = value
        self.first = (
            first  # the first token whose values are present; the last one is the node's last
        )
        self.nbytes = nbytes
        self.used = 0  # the turn of the last use


class BlockNode:
    """A block of tokens that follows its parent's tokens."""

    __slots__ = ("children", "end", "extras", "key", "order", "own", "parent", "tails", "tokens")

    def __init__(
        self, parent: "BlockNode | None", tokens: bytes, rules: BlockRules, *, salt: bytes = b""
    ) -> None:
        count = len(tokens) // TOKEN_BYTES
        self.parent = parent
        self.tokens = tokens
        self.end: int = count if parent is None else parent.end + count
        """Number of tokens up to the end of the block, counted from the root."""
        is_full = parent is not None and count == rules.block
        self.key: bytes = block_hash(parent.key, tokens) if parent is not None and is_full else salt
        """The name of a full block; b"" for a tail; the salt's key for a root."""
        self.children: dict[bytes, BlockNode] = {}
        self.order: list[bytes] = []
        """The children's tokens, sorted: those that share most with a key are neighbours of its place."""
        self.tails = 0
        """Number of children that are shorter than a block."""
        self.own: CacheItem | None = None
        self.extras: list[CacheItem | None] = [None] * rules.kinds

    @property
    def start(self) -> int:
        """Number of tokens before the block, counted from the root."""
        return self.end - len(self.tokens) // TOKEN_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes that removing the node would free."""
        return sum(item.nbytes for item in (self.own, *self.extras) if item is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """Nodes from the first block on, and the number of their tokens to use: all, or only a part of the last one."""

    path: tuple[BlockNode, ...] = ()
    length: int = 0


def find_match(root: BlockNode, tokens: bytes, rules: BlockRules, *, limit: int) -> PrefixMatch:
    """Return the longest run of at most `limit` of these tokens from which a model can continue.

    Takes time linear in the number of tokens. The run is the longest one except in one case: of several children that
    begin with a part of the next block only the two nearest are checked; with windows, a third one may still have values
    that these have lost.
    """
    path: list[BlockNode] = []
    gaps = [0] * len(rules.windows)  # the last token of each window whose values are missing
    node, best, depth = root, 0, 0
    side: BlockNode | None = None  # the last node, if it is not part of the path
    while True:
        tail = _tail(node, tokens, rules, limit, gaps)
        if tail is not None:
            best, depth, side = tail.end, len(path), tail
        child = _next_full(node, tokens, rules)
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
    """Return the nodes that stand for these tokens, as far as they exist; the last one may go beyond the tokens."""
    path: list[BlockNode] = []
    node = root
    while (child := _next_full(node, tokens, rules)) is not None:
        path.append(child)
        node = child
    rest = tokens[node.end * TOKEN_BYTES :]
    if not rest or len(rest) >= rules.block * TOKEN_BYTES:
        return path
    at = bisect_left(node.order, rest)
    if at == len(node.order) or not node.order[at].startswith(rest):
        return path
    # A model can continue from a state at its node's end only, so a longer block does not stand for a shorter one.
    if len(node.order[at]) == len(rest) or not rules.has_state:
        path.append(node.children[node.order[at]])
    return path


def find_partial_block(node: BlockNode, tokens: bytes) -> BlockNode | None:
    """Return the longest tail below a node that is a proper prefix of these tokens."""
    if not node.tails:
        return None
    for size in range(len(tokens) - TOKEN_BYTES, 0, -TOKEN_BYTES):
        child = node.children.get(tokens[:size])
        if child is not None:
            return child
    return None


def _next_full(node: BlockNode, tokens: bytes, rules: BlockRules) -> BlockNode | None:
    start = node.end * TOKEN_BYTES
    child = node.children.get(tokens[start : start + rules.block * TOKEN_BYTES])
    return child if child is not None and child.key else None


def _gaps(node: BlockNode, end: int, before: Sequence[int]) -> list[int]:
    """Return the last token before `end` whose values are missing in each window; 0 if none is missing."""
    return [
        end if item is None else gap if item.first == node.start else item.first
        for gap, item in zip(before, node.extras, strict=False)
    ]


def _is_usable(node: BlockNode, end: int, rules: BlockRules, before: Sequence[int]) -> bool:
    """Return whether a model can continue from `end`, which lies in `node`; `before` are the gaps of its parents."""
    for size, gap in zip(rules.windows, _gaps(node, end, before), strict=True):
        if gap and end - size < gap:
            return False
    return not rules.has_state or (end == node.end and node.extras[-1] is not None)


def _tail(
    node: BlockNode, tokens: bytes, rules: BlockRules, limit: int, gaps: Sequence[int]
) -> BlockNode | None:
    """Return the longest tail below a node that these tokens contain and from whose state a model can continue."""
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
    """Yield the children that share most of the next tokens, and the end of the shared run."""
    if rules.has_state:
        return
    start = node.end * TOKEN_BYTES
    rest = tokens[start : start + rules.block * TOKEN_BYTES]
    at = bisect_left(node.order, rest)
    for key in node.order[max(0, at - 1) : at + 1]:
        shared = min(count_common(key, rest), limit - node.end)
        if shared > 0:
            yield node.children[key], node.end + shared


class BlockTree:
    """The cached values, by the tokens that they belong to."""

    def __init__(self, rules: BlockRules, *, limit_bytes: int) -> None:
        self.rules = rules
        self.limit_bytes = limit_bytes
        self.nbytes = 0
        self.entries = 0
        self.evictions = 0
        """Number of items evicted for lack of room."""
        self.root = BlockNode(None, b"", rules)
        """The root of the blocks without a salt."""
        self._salted: dict[bytes, BlockNode] = {}  # the roots of other salts that have blocks
        self._uses: OrderedDict[CacheItem, None] = OrderedDict()  # least recently used first
        self._pinned: dict[CacheItem, None] = {}  # never evicted
        self._turn = 0  # the number of touches: a clock that is the same on every rank

    def root_of(self, salt: str) -> BlockNode:
        """Return the root of a salt's blocks; the tree keeps it as long as it has any."""
        if not salt:
            return self.root
        key = salt_key(salt)
        return self._salted.get(key) or BlockNode(None, b"", self.rules, salt=key)

    def match(self, tokens: bytes, *, limit: int, root: BlockNode | None = None) -> PrefixMatch:
        """Return the longest run of at most `limit` of these tokens from which a model can continue."""
        return find_match(root or self.root, tokens, self.rules, limit=limit)

    def walk(self, tokens: bytes, root: BlockNode | None = None) -> list[BlockNode]:
        """Return the nodes that stand for these tokens, as far as they exist; the last one may go beyond the tokens."""
        return walk_path(root or self.root, tokens, self.rules)

    def find_partial(self, node: BlockNode, tokens: bytes) -> BlockNode | None:
        """Return the tail behind a full block or a root with which the next block of these tokens begins."""
        start = node.end * TOKEN_BYTES
        return find_partial_block(node, tokens[start : start + self.rules.block * TOKEN_BYTES])

    def touch(self, path: Sequence[BlockNode], end: int) -> None:
        """Mark a path as used up to the token `end`, with the windows and states that are needed to continue there."""
        self._turn += 1
        for item in self._needed(path, end):
            self._use(item)

    def pin(self, path: Sequence[BlockNode], end: int) -> None:
        """Keep a path, with the windows and states that are needed to continue at `end`, until `unpin`."""
        for item in self._needed(path, end):
            self._uses.pop(item, None)
            self._pinned[item] = None

    def unpin(self) -> None:
        """Make everything that is pinned the least recently used."""
        self._uses = OrderedDict([*self._pinned.items(), *self._uses.items()])
        self._pinned.clear()

    @property
    def pinned_tokens(self) -> int:
        """Tokens of the pinned blocks."""
        own = (item.node for item in self._pinned if item.slot is None)
        return sum(node.end - node.start for node in own)

    def match_pinned(self, tokens: bytes, *, limit: int) -> PrefixMatch:
        """Return the same as `match` for the blocks without a salt, of those that are pinned."""
        path = takewhile(self._is_pinned, self.walk(tokens))
        end = max((node.end for node in path), default=0)
        tokens = tokens[: end * TOKEN_BYTES]
        return find_match(self.root, tokens, self.rules, limit=min(limit, end))

    def make_room(self, sizes: Sequence[int]) -> int:
        """Evict until these sizes fit, but nothing since the last touch; return the number of sizes that fit."""
        total = 0
        for count, size in enumerate(sizes):
            total += size
            while self.nbytes + total > self.limit_bytes:
                oldest = next(iter(self._uses), None)
                if oldest is None or oldest.used == self._turn:
                    return count
                self._evict(oldest)
        return len(sizes)

    def add(self, parent: BlockNode, tokens: bytes, value: Value, nbytes: int) -> BlockNode:
        """Add a block below `parent` and replace a tail that it begins with. Touch its whole path afterwards."""
        tail = find_partial_block(parent, tokens)
        # A state at the tail's end is usable only there. The new block has everything else of the tail.
        if tail is not None and not (self.rules.has_state and tail.extras[-1]):
            self._drop(tail)
        node = BlockNode(parent, tokens, self.rules)
        node.own = CacheItem(node, None, value, nbytes + NODE_BYTES, first=node.start)
        parent.children[tokens] = node
        insort(parent.order, tokens)
        parent.tails += not node.key
        if parent.parent is None and parent is not self.root:
            self._salted[parent.key] = parent
        self.entries += 1
        self._insert(node.own)
        return node

    def attach(self, node: BlockNode, slot: int, value: Value, nbytes: int, *, first: int) -> None:
        """Add values of one kind of layers for a node's tokens from `first` on; `slot` is the kind's index in `extras`."""
        old = node.extras[slot]
        is_pinned = old is not None and old in self._pinned
        if old is not None:
            self._release(old)
        item = CacheItem(node, slot, value, nbytes, first=first)
        node.extras[slot] = item
        self._insert(item)
        if is_pinned:
            self._pinned[item] = self._uses.pop(item)

    def trim(self, limit_bytes: int) -> None:
        """Evict until the tree holds at most this many bytes."""
        while self.nbytes > limit_bytes and self._uses:
            self._evict(next(iter(self._uses)))

    def recent(self) -> Iterator[BlockNode]:
        """Yield the nodes, pinned ones and then last used first; a node comes before those below it."""
        pinned = sorted(self._pinned, key=lambda item: item.node.end)
        return (item.node for item in chain(pinned, reversed(self._uses)) if item.slot is None)

    def _needed(self, path: Sequence[BlockNode], end: int) -> Iterator[CacheItem]:
        """Yield the values of a path that are needed to continue at `end`, from there to the beginning."""
        windows = self.rules.windows
        for node in reversed(path):
            for kind, item in enumerate(node.extras):
                is_near = kind < len(windows) and node.end > end - windows[kind]
                if item is not None and (is_near or node.end == end):
                    yield item
            if node.own is not None:
                yield node.own

    def _is_pinned(self, node: BlockNode) -> bool:
        return node.own is not None and node.own in self._pinned

    def _use(self, item: CacheItem) -> None:
        item.used = self._turn
        if item in self._uses:
            self._uses.move_to_end(item)

    def _insert(self, item: CacheItem) -> None:
        item.used = self._turn
        self._uses[item] = None
        self.nbytes += item.nbytes

    def _evict(self, item: CacheItem) -> None:
        self.evictions += 1
        if item.slot is None:
            self._drop(item.node)
            return
        item.node.extras[item.slot] = None
        self._release(item)

    def _drop(self, node: BlockNode) -> None:
        assert node.parent is not None
        parent, node.parent = node.parent, None
        del parent.children[node.tokens]
        del parent.order[bisect_left(parent.order, node.tokens)]
        parent.tails -= not node.key
        if not parent.children and self._salted.get(parent.key) is parent:
            del self._salted[parent.key]  # clients choose salts, so roots must not pile up
        self.entries -= 1
        for item in (node.own, *node.extras):
            if item is not None:
                self._release(item)

    def _release(self, item: CacheItem) -> None:
        self._uses.pop(item, None)
        self._pinned.pop(item, None)
        self.nbytes -= item.nbytes
        # Nodes and items refer to each other: without this, arrays would live until the next garbage collection.
        item.value = None
