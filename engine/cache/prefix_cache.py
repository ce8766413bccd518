"""The prefix cache: the keys and values of earlier prompts, by blocks of tokens. Worker thread only.

block_tree.py finds and evicts blocks without mlx; layer_copies.py copies their values.
"""

import logging
from collections.abc import Callable, Sequence
from itertools import islice
from operator import attrgetter

import mlx.core as mx

from engine.cache import layer_copies
from engine.cache.block_tree import (
    NODE_BYTES,
    TOKEN_BYTES,
    BlockNode,
    BlockTree,
    PrefixMatch,
    encode_tokens,
)
from engine.cache.copy_plan import BlockCopy, plan_copies
from engine.cache.disk_blocks import BlockDisk
from engine.cache.interface import (
    ADAPTER_SALT,
    BLOCK_TOKENS,
    DiskCacheStats,
    LayerCache,
    PrefixCacheStats,
)
from engine.cache.layer_copies import BlockPacking, CacheRows

log = logging.getLogger(__name__)


class BlockPrefixCache:
    """Implements `PrefixCache` for prefixes of any number of sequences within `limit_bytes`; 0 turns it off.

    A match may end at any token. Models with recurrent layers are an exception: they can continue only from the end of a
    `store`, and each store copies their whole state, whose size does not depend on the number of tokens. For them, call
    `store` where other prompts may continue: about every thousand tokens, and before the last token of a prompt (`fetch`
    always leaves one token to compute, so the same prompt cannot use a state at its very end).
    """

    def __init__(
        self,
        make: Callable[[], list[LayerCache]],
        *,
        limit_bytes: int,
        block: int = BLOCK_TOKENS,
        token_bytes: int | None = None,
        disk: BlockDisk | None = None,
    ) -> None:
        """`make` returns the model's empty caches for one sequence; `block` is in tokens.

        `token_bytes` replaces the real size of a token: stages of a pipeline with different numbers of layers must evict
        the same blocks. It is valid only for models whose layers all keep every token. `disk` keeps full blocks beyond
        the end of the process; models with windows or states do without it.
        """
        self._token_bytes = token_bytes
        self._make = make
        self._layout = layer_copies.find_layout(make())
        self._blocks = BlockTree(self._layout.rules(block), limit_bytes=limit_bytes)
        rules = self._blocks.rules
        self._disk = None if rules.kinds or not limit_bytes else disk
        self._packings: list[BlockPacking] = []  # known from the first store on
        self._lookups = self._hits = self._asked = self._hit_tokens = self._stored_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes held: arrays, and 2 KiB a block for everything else."""
        return self._blocks.nbytes

    @property
    def stats(self) -> PrefixCacheStats:
        """Return statistics for metrics."""
        return PrefixCacheStats(
            lookups=self._lookups,
            hits=self._hits,
            asked_tokens=self._asked,
            hit_tokens=self._hit_tokens,
            stored_bytes=self._stored_bytes,
            evictions=self._blocks.evictions,
            entries=self._blocks.entries,
            pinned_tokens=self._blocks.pinned_tokens,
            nbytes=self._blocks.nbytes,
            disk=DiskCacheStats() if self._disk is None else self._disk.files.stats,
        )

    def summary(self, limit: int) -> list[str]:
        """Return the names of at most `limit` full blocks, last used first; a block comes before those that follow it.

        A name identifies all tokens up to its block's end, and any process can compute it: the hexadecimal digits of
        BLAKE2b with digest_size=8 over the name of the previous block (8 bytes; for the first one `salt_key` of the salt,
        which is empty without a salt) and this block's tokens as little-endian uint32. A prompt is held up to the last of its blocks whose name is listed.
        """
        full = (node.key.hex() for node in self._blocks.recent() if node.key)
        return list(islice(full, max(0, limit)))

    def match(self, tokens: Sequence[int], salt: str = "") -> int:
        """Return how many of the first tokens `fetch` would find; always less than all. Changes nothing."""
        return self._find_match(tokens, salt).length

    def fetch(self, tokens: Sequence[int], salt: str = "") -> tuple[list[LayerCache], int]:
        """Return caches for one sequence, filled with its first tokens, and their number; the caller owns the caches."""
        caches = self._make()
        if not self._blocks.limit_bytes:
            return caches, 0
        if self._disk is not None:
            self._load(self._disk, tokens, salt)
        match = self._find_match(tokens, salt)
        self._lookups += 1
        self._asked += len(tokens)
        if match.length:
            self._hits += 1
            self._hit_tokens += match.length
            self._blocks.touch(match.path, match.length)
            self._fill(layer_copies.flatten_caches(caches), match)
        return caches, match.length

    def store(self, tokens: Sequence[int], caches: Sequence[LayerCache], salt: str = "") -> None:
        """Store the values of these tokens, the first of a sequence, from its caches; the caller keeps the caches.

        Copies only values that are not held yet, so calling it after each piece of a prompt costs no more than calling it
        once. Values that do not fit are left out. States of recurrent layers are stored only if the caches have read
        exactly these tokens.

        Raises:
            TypeError: the caches differ in kind or shape from those of `make` or of an earlier call.

        """
        if not self._blocks.limit_bytes:
            return
        self._store_in_memory(tokens, caches, salt)
        if self._disk is not None:
            self._offer(self._disk, tokens, salt)

    def _store_in_memory(
        self, tokens: Sequence[int], caches: Sequence[LayerCache], salt: str
    ) -> None:
        held = self._rows(caches)
        read = {rows.stop for kind in held for rows in kind.values()} or {len(tokens)}
        end = min(len(tokens), *read)
        has_state = self._blocks.rules.has_state
        if not end or (has_state and read != {len(tokens)}):
            return
        data = encode_tokens(tokens)[: end * TOKEN_BYTES]
        root = self._blocks.root_of(salt)
        path = self._blocks.walk(data, root)
        self._blocks.touch(path, end)
        starts = [max((rows.start for rows in kind.values()), default=0) for kind in held[1:]]
        tail = self._blocks.find_partial(path[-1] if path else root, data)
        pieces = plan_copies(path, tail, end, starts, self._blocks.rules)
        has_end = bool(path) and path[-1].end == end and path[-1].extras[-1:] != [None]
        recurrent = (
            self._recurrent(layer_copies.flatten_caches(caches))
            if has_state and not has_end
            else []
        )
        if pieces or recurrent:
            self._insert(data, [root, *path], pieces, held, recurrent)

    def pin(self, tokens: Sequence[int]) -> None:
        """Never evict these tokens, as far as their full blocks are held, and keep them on disk before others."""
        data = encode_tokens(tokens)
        end = len(tokens)
        path = [node for node in self._blocks.walk(data) if node.key and node.end <= end]
        if path:
            self._blocks.pin(path, path[-1].end)
        if self._disk is not None:
            self._disk.files.pin(self._disk.keys("", data, self._blocks.rules.block))

    def trim(self, limit_bytes: int) -> None:
        """Evict the least recently used items until at most this many bytes are held."""
        self._blocks.trim(limit_bytes)

    def close(self) -> None:
        """Drop everything in memory, and write what waits for the disk, for a few seconds at most."""
        self._blocks.unpin()
        self.trim(0)
        if self._disk is not None:
            self._disk.files.close()

    def _load(self, disk: BlockDisk, tokens: Sequence[int], salt: str) -> None:
        """Add the blocks on disk that follow those in memory, as far as they fit."""
        size = self._blocks.rules.block
        data = encode_tokens(tokens)[:-TOKEN_BYTES]
        keys = disk.keys(salt, data, size)
        root = self._blocks.root_of(salt)
        path = [node for node in self._blocks.walk(data, root) if node.key]
        blocks: list[layer_copies.Block] = []
        room = self._blocks.limit_bytes - sum(node.nbytes for node in path)
        for key in keys[len(path) :]:
            packing = self._packings[0] if self._packings else None
            read = disk.read(key, self._layout.whole, size, packing)
            room -= 0 if read is None else layer_copies.block_bytes(read[1]) + NODE_BYTES
            if read is None or room < 0:
                break
            self._packings = self._packings or [read[0]]
            blocks.append(read[1])
        if blocks:
            self._blocks.touch(path, len(path) * size)
            weights = [layer_copies.block_bytes(block) for block in blocks]
            fitting = self._blocks.make_room([weight + NODE_BYTES for weight in weights])
            for block, weight in zip(blocks[:fitting], weights, strict=False):
                start = len(path) * size * TOKEN_BYTES
                part = data[start : start + size * TOKEN_BYTES]
                path.append(self._blocks.add(path[-1] if path else root, part, block, weight))
            self._blocks.touch(path, len(path) * size)
            log.debug("prefix read from disk", extra={"blocks": fitting, "tokens": fitting * size})
        if path:
            disk.files.touch(keys[: len(path)])

    def _offer(self, disk: BlockDisk, tokens: Sequence[int], salt: str) -> None:
        """Queue the blocks of these tokens to be written that are not on disk yet, the first ones first."""
        data = encode_tokens(tokens)
        path = self._blocks.walk(data, self._blocks.root_of(salt))
        keys = disk.keys(salt, data, self._blocks.rules.block)
        held = {key: node.own for node, key in zip(path, keys, strict=False) if node.key}
        missing = [(k, own) for k, own in held.items() if own and not disk.files.is_known(k)]
        if missing:
            log.debug("prefix on its way to the disk", extra={"blocks": len(missing)})
        if missing and all(disk.offer(key, self._packings[0], own.value) for key, own in missing):
            # A block is of no use without those before it, so they must not be older.
            disk.files.touch(list(held))

    def _find_match(self, tokens: Sequence[int], salt: str) -> PrefixMatch:
        if not self._blocks.entries:
            return PrefixMatch()
        data, limit = encode_tokens(tokens), len(tokens) - 1
        match = self._blocks.match(data, limit=limit, root=self._blocks.root_of(salt))
        if not salt or salt.startswith(ADAPTER_SALT):
            return match
        # Pinned tokens are in the deployment's spec: they are no secret of the key that sent them.
        return max(match, self._blocks.match_pinned(data, limit=limit), key=attrgetter("length"))

    def _recurrent(self, leaves: list[LayerCache]) -> list[LayerCache]:
        return [leaves[at] for at in self._layout.states]

    def _rows(self, caches: Sequence[LayerCache]) -> list[dict[int, CacheRows]]:
        """Return the parts of non-empty caches that can be copied by tokens, kind by kind."""
        found = layer_copies.flatten_caches(caches)
        if layer_copies.find_layout(caches) != self._layout:
            got = ", ".join(dict.fromkeys(type(cache).__name__ for cache in found))
            want = ", ".join(
                dict.fromkeys(
                    type(cache).__name__ for cache in layer_copies.flatten_caches(self._make())
                )
            )
            raise TypeError(
                f"store() was given {len(found)} layers of {got}, but make() makes {want}; "
                "give it one sequence's caches, as fetch() returned them"
            )
        return [
            {at: rows for at in kind if (rows := layer_copies.read_rows(found[at])) is not None}
            for kind in self._layout.packed
        ]

    def _pack(self, held: list[dict[int, CacheRows]]) -> list[BlockPacking]:
        block_packings = [layer_copies.find_packing(kind) for kind in held]
        self._packings = self._packings or block_packings
        if block_packings != self._packings:
            raise TypeError(
                f"store() was given arrays of (heads, size, type) {[block_packing.shapes for block_packing in block_packings]}, "
                f"but holds {[packing.shapes for packing in self._packings]}; one cache is for one model"
            )
        return block_packings

    def _insert(
        self,
        data: bytes,
        path: list[BlockNode],
        pieces: list[BlockCopy],
        held: list[dict[int, CacheRows]],
        recurrent: list[LayerCache],
    ) -> None:
        """Copy the pieces that fit and add them below `path`, which begins with a root; copy a state only if everything fits."""
        packings = self._pack(held)
        weight = layer_copies.state_bytes(recurrent)
        sizes = [self._size(piece, packings) for piece in pieces]
        needed = sum(node.nbytes for node in path) + weight + sum(sizes)
        if recurrent and needed > self._blocks.limit_bytes:
            return  # the state and the blocks are useless without each other
        fitting = self._blocks.make_room([weight, *sizes])
        pieces = pieces[: max(0, fitting - 1)]
        copies = _copy_all(pieces, held, packings)
        copy = layer_copies.copy_states(recurrent)
        for piece, blocks in zip(pieces, copies, strict=True):
            node = piece.node
            if node is None:
                tokens = data[piece.start * TOKEN_BYTES : piece.stop * TOKEN_BYTES]
                size = self._weight(piece.stop - piece.start, blocks[0])
                node = self._blocks.add(path[-1], tokens, blocks[0], size)
                path.append(node)
            for part in piece.parts:
                block = blocks[part.kind]
                if part.kind:
                    slot, size = part.kind - 1, layer_copies.block_bytes(block)
                    self._blocks.attach(node, slot, block, size, first=part.since)
                self._stored_bytes += layer_copies.block_bytes(block)
        if recurrent:
            slot = len(self._layout.windows)
            self._blocks.attach(path[-1], slot, copy, weight, first=path[-1].start)
            self._stored_bytes += weight
        if path[-1].end:
            self._blocks.touch(path, min(path[-1].end, len(data) // TOKEN_BYTES))

    def _size(self, piece: BlockCopy, packings: Sequence[BlockPacking]) -> int:
        own = NODE_BYTES if piece.node is None else 0
        each = [self._token_bytes or packed.token_bytes for packed in packings]
        return own + sum((piece.stop - part.since) * each[part.kind] for part in piece.parts)

    def _weight(self, tokens: int, block: layer_copies.Block) -> int:
        return (
            layer_copies.block_bytes(block)
            if self._token_bytes is None
            else tokens * self._token_bytes
        )

    def _fill(self, leaves: list[LayerCache], found: PrefixMatch) -> None:
        """Fill empty caches with the values of a match."""
        windows = self._layout.windows
        for kind, packed in enumerate(self._packings):
            first = max(0, found.length - windows[kind - 1][0]) if kind else 0
            near = [node for node in found.path if node.end > first]
            held = [node.extras[kind - 1] if kind else node.own for node in near]
            blocks = [item.value for item in held if item is not None]
            before = next(item.first for item in held if item is not None)
            arrays = layer_copies.join_blocks(
                packed, blocks, (first - before, found.length - before)
            )
            for at, own in arrays.items():
                layer_copies.fill_cache(leaves[at], own, found.length)
        state = found.path[-1].extras[-1] if self._layout.states else None
        if state is not None:
            layer_copies.restore_states(self._recurrent(leaves), state.value)
        # Otherwise blocks that are evicted next stay in memory until the caller evaluates the caches.
        mx.eval([leaf.state for leaf in leaves])


def _copy_all(
    pieces: Sequence[BlockCopy],
    held: Sequence[dict[int, CacheRows]],
    packings: Sequence[BlockPacking],
) -> list[dict[int, layer_copies.Block]]:
    """Return each piece's copies by kind."""
    copies_by_piece: list[dict[int, layer_copies.Block]] = [{} for _ in pieces]
    for kind, (rows, packed) in enumerate(zip(held, packings, strict=True)):
        chosen = [
            (copies, part, piece.stop)
            for piece, copies in zip(pieces, copies_by_piece, strict=True)
            for part in piece.parts
            if part.kind == kind
        ]
        cuts = [(part.first, stop) for _, part, stop in chosen]
        for (copies, part, _), block in zip(
            chosen, layer_copies.copy_blocks(rows, packed, cuts), strict=True
        ):
            copies[kind] = (
                block if part.before is None else layer_copies.append_block(part.before, block)
            )
    return copies_by_piece
