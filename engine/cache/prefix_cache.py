"""The prefix cache: the keys and values of earlier prompts, by blocks of tokens. Worker thread only.

block_tree.py finds and evicts blocks without mlx; layer_copies.py copies their values.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from operator import attrgetter
from typing import Any

import mlx.core as mx

from engine.cache import layer_copies
from engine.cache.block_tree import (
    NODE_BYTES,
    TOKEN_BYTES,
    BlockNode,
    BlockTree,
    CacheItem,
    PrefixMatch,
    encode_tokens,
)
from engine.cache.copy_plan import BlockCopy, plan_copies
from engine.cache.disk_blocks import BlockDisk
from engine.cache.disk_items import DiskBlock, find_run, item_key, needed_slots, tail_key
from engine.cache.interface import (
    ADAPTER_SALT,
    BLOCK_TOKENS,
    DiskCacheStats,
    LayerCache,
    PrefixCacheStats,
)
from engine.cache.layer_copies import BlockPacking, CacheRows

log = logging.getLogger(__name__)

# Runs that one lookup tries to read: each file that cannot be used costs one.
_MOST_DAMAGED = 4


class BlockPrefixCache:
    """Prefixes of any number of sequences within `limit_bytes`; 0 turns it off.

    Prompts with different salts share nothing but pinned tokens: `match` and `fetch` find only what was stored with the
    same salt.

    A match may end at any token. Models with recurrent layers are an exception: they can continue only from a checkpoint,
    which copies their whole state, whose size does not depend on the number of tokens. Call `store` at the positions of
    `plan_checkpoints`, and before the last token of a prompt (`fetch` always leaves one token to compute, so the same
    prompt cannot use a state at its very end).
    """

    def __init__(
        self,
        make: Callable[[], list[LayerCache]],
        *,
        limit_bytes: int,
        block: int = BLOCK_TOKENS,
        token_bytes: int | None = None,
        checkpoint_tokens: int = 512,
        disk: BlockDisk | None = None,
    ) -> None:
        """`make` returns the model's empty caches for one sequence; `block` is in tokens.

        `token_bytes` replaces the real size of a token: stages of a pipeline with different numbers of layers must evict
        the same blocks. It is valid only for models whose layers all keep every token. `disk` keeps blocks beyond the
        end of the process: every full block, and the windows and the state of each checkpoint. `checkpoint_tokens` is the
        distance of those inside a prompt.
        """
        self._token_bytes = token_bytes
        self._checkpoint_tokens = checkpoint_tokens
        self._make = make
        self._layout = layer_copies.find_layout(make())
        self._blocks = BlockTree(self._layout.rules(block), limit_bytes=limit_bytes)
        self._disk = disk if limit_bytes else None
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
            if self._disk is not None and self._blocks.rules.windows:
                # Other prompts may leave this one here, too. A state needs `plan_checkpoints` for that.
                end = match.length // self._blocks.rules.block * self._blocks.rules.block
                self._offer(self._disk, tokens[:end], salt, is_checkpoint=True)
        return caches, match.length

    def store(
        self,
        tokens: Sequence[int],
        caches: Sequence[LayerCache],
        salt: str = "",
        *,
        is_checkpoint: bool = True,
    ) -> None:
        """Store the values of these tokens, the first of a sequence, from its caches; the caller keeps the caches.

        Copies only values that are not held yet, so calling it after each piece of a prompt costs no more than calling it
        once. Values that do not fit are left out. The caches of a model with recurrent layers must have read exactly these
        tokens, otherwise nothing is stored. States are stored, and windows and states go to the disk, only with
        `is_checkpoint`: a state has the same size after 64 and after 64,000 tokens.

        Raises:
            TypeError: the caches differ in kind or shape from those of `make` or of an earlier call.

        """
        if not self._blocks.limit_bytes:
            return
        self._store_in_memory(tokens, caches, salt, is_checkpoint=is_checkpoint)
        if self._disk is not None:
            self._offer(self._disk, tokens, salt, is_checkpoint=is_checkpoint)

    def plan_checkpoints(
        self, tokens: Sequence[int], salt: str = "", *, start: int, shared: int = 0
    ) -> tuple[int, ...]:
        """Return the positions behind `start` where `store` should make a checkpoint of this prompt, ascending.

        They are ends of blocks: at fixed distances, at the end of the `shared` tokens with which other prompts begin, and
        where this prompt leaves an earlier one, because a third one may leave it there, too. None are needed where a
        match may end at any token.
        """
        rules = self._blocks.rules
        is_needed = rules.has_state or (bool(rules.windows) and self._disk is not None)
        if not self._blocks.limit_bytes or not is_needed:
            return ()
        data = encode_tokens(tokens)[:-TOKEN_BYTES]
        path = [node for node in self._blocks.walk(data, self._blocks.root_of(salt)) if node.key]
        branch = len(path)
        if self._disk is not None:
            keys = self._disk.keys(salt, data, rules.block)
            is_on_disk = self._disk.files.has_file
            branch = next(
                (n for n in range(branch, len(keys)) if not is_on_disk(keys[n])), len(keys)
            )
        grid = range(self._checkpoint_tokens, len(tokens), self._checkpoint_tokens)
        ends = {*grid, branch * rules.block, shared // rules.block * rules.block}
        return tuple(sorted(end for end in ends if start < end < len(tokens)))

    def _store_in_memory(
        self,
        tokens: Sequence[int],
        caches: Sequence[LayerCache],
        salt: str,
        *,
        is_checkpoint: bool,
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
            if has_state and is_checkpoint and not has_end
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
        """Add the values on disk that continue those in memory, as far as they fit."""
        rules = self._blocks.rules
        data = encode_tokens(tokens)[:-TOKEN_BYTES]
        held = self._find_match(tokens, salt).length
        run: list[DiskBlock] = []
        # A file that cannot be used is deleted, and the next run does without it.
        for _ in range(_MOST_DAMAGED):
            root = self._blocks.root_of(salt)
            path = [node for node in self._blocks.walk(data, root) if node.key]
            full = _disk_blocks(disk.keys(salt, data, rules.block), path, rules.block)
            run = find_run(full, data, rules, disk.files.has_file)
            if run and run[-1].stop % rules.block:
                tail = self._blocks.walk(data[: run[-1].stop * TOKEN_BYTES], root)[-1:]
                is_held = bool(tail) and not tail[0].key and tail[0].end == run[-1].stop
                run[-1] = replace(run[-1], node=tail[0] if is_held else None)
            if not run or run[-1].stop <= held or self._load_run(disk, run, data, salt):
                break
        if run:
            disk.files.touch([key for block in run for key in self._item_keys(block, run[-1].stop)])

    def _load_run(self, disk: BlockDisk, run: list[DiskBlock], data: bytes, salt: str) -> bool:
        """Read the values of a run that are not in memory, and add those that fit; False if a file could not be used."""
        rules, end, limit = self._blocks.rules, run[-1].stop, self._blocks.limit_bytes
        room = limit - sum(block.node.nbytes for block in run if block.node is not None)
        packings = dict(enumerate(self._packings))
        blocks: list[tuple[DiskBlock, layer_copies.Block]] = []
        extras: list[tuple[DiskBlock, int, Any, int]] = []
        is_whole = True
        for block in run:
            if block.node is None:
                value = self._read_block(disk, block, None, packings)
                room -= 0 if value is None else layer_copies.block_bytes(value) + NODE_BYTES
                if value is None or room < 0:
                    is_whole = value is not None
                    break
                blocks.append((block, value))
            for slot in needed_slots(block, end, rules):
                if block.node is not None and block.node.extras[slot] is not None:
                    continue
                extra = self._read_extra(disk, block, slot, packings)
                if extra is None:
                    return False
                room -= extra[1]
                extras.append((block, slot, *extra))
        if rules.kinds and (not is_whole or room < 0):
            return is_whole  # blocks are useless without the windows and the state behind them
        if len(packings) < len(self._layout.packed):
            return is_whole
        self._packings = [packings[kind] for kind in range(len(packings))]
        self._add_run(run, data, salt, blocks, extras)
        return is_whole or bool(blocks)

    def _add_run(
        self,
        run: list[DiskBlock],
        data: bytes,
        salt: str,
        blocks: list[tuple[DiskBlock, layer_copies.Block]],
        extras: list[tuple[DiskBlock, int, Any, int]],
    ) -> None:
        path = [block.node for block in run if block.node is not None]
        self._blocks.touch(path, path[-1].end if path else 0)
        sizes = [layer_copies.block_bytes(value) + NODE_BYTES for _, value in blocks]
        fitting = self._blocks.make_room([sum(size for *_, size in extras), *sizes]) - 1
        nodes = {block.stop: block.node for block in run if block.node is not None}
        parent = path[-1] if path else self._blocks.root_of(salt)
        for block, value in blocks[: max(0, fitting)]:
            part = data[block.start * TOKEN_BYTES : block.stop * TOKEN_BYTES]
            parent = self._blocks.add(parent, part, value, layer_copies.block_bytes(value))
            path.append(parent)
            nodes[block.stop] = parent
        for block, slot, value, size in extras:
            if fitting >= 0 and block.stop in nodes:
                # Arrays of a window may begin later than their block.
                is_state = slot == len(self._layout.windows)
                first = block.start if is_state else block.stop - value[0].shape[2]
                self._blocks.attach(nodes[block.stop], slot, value, size, first=first)
        self._blocks.touch(path, path[-1].end if path else 0)
        fields = {"blocks": max(0, fitting), "tokens": path[-1].end if path else 0}
        log.debug("prefix read from disk", extra=fields)

    def _read_block(
        self, disk: BlockDisk, block: DiskBlock, slot: int | None, packings: dict[int, BlockPacking]
    ) -> layer_copies.Block | None:
        """Read a block's values of layers that are copied by tokens, and learn their packing."""
        kind, size = 0 if slot is None else slot + 1, block.stop - block.start
        sizes = range(size if slot is None else 1, size + 1)
        caches = self._layout.packed[kind]
        read = disk.read(item_key(block.key, slot), caches, sizes, packings.get(kind))
        if read is None:
            return None
        packings[kind] = read[0]
        return read[1]

    def _read_extra(
        self, disk: BlockDisk, block: DiskBlock, slot: int, packings: dict[int, BlockPacking]
    ) -> tuple[Any, int] | None:
        """Read the values of a window or a state, and return them with their size."""
        if slot < len(self._layout.windows):
            value = self._read_block(disk, block, slot, packings)
            return None if value is None else (value, layer_copies.block_bytes(value))
        state = disk.read_state(item_key(block.key, slot), len(self._layout.states))
        if state is None:
            return None
        try:
            leaves = layer_copies.flatten_caches(self._make())
            layer_copies.restore_states(self._recurrent(leaves), state)
        except (TypeError, ValueError):  # caches of another release have other states
            disk.files.discard(item_key(block.key, slot))
            return None
        return state, layer_copies.block_bytes(tuple(state.arrays.values()))

    def _item_keys(self, block: DiskBlock, end: int) -> list[str]:
        slots = (None, *needed_slots(block, end, self._blocks.rules))
        return [item_key(block.key, slot) for slot in slots]

    def _offer(
        self, disk: BlockDisk, tokens: Sequence[int], salt: str, *, is_checkpoint: bool
    ) -> None:
        """Queue the values of these tokens to be written that are not on disk yet, the first ones first."""
        rules, data = self._blocks.rules, encode_tokens(tokens)
        path = self._blocks.walk(data, self._blocks.root_of(salt))
        keys = disk.keys(salt, data, rules.block)
        run = [
            block
            for block in _disk_blocks(keys, [node for node in path if node.key], rules.block)
            if block.node is not None
        ]
        tail = path[-1] if path and not path[-1].key and path[-1].end == len(tokens) else None
        if tail is not None and run and is_checkpoint and rules.kinds:
            key = tail_key(run[-1].key, tail.tokens)
            run.append(DiskBlock(start=tail.start, stop=tail.end, key=key, node=tail))
        if not run:
            return
        end = run[-1].stop
        for block in run:
            for slot in (None, *(needed_slots(block, end, rules) if is_checkpoint else ())):
                item = block.node and (block.node.own if slot is None else block.node.extras[slot])
                key = item_key(block.key, slot)
                if item and not disk.files.is_known(key) and not self._write(disk, key, slot, item):
                    return
        # A block is of no use without those before it, so they must not be older.
        held = [key for block in run for key in self._item_keys(block, end)]
        disk.files.touch([key for key in held if disk.files.is_known(key)])

    def _write(self, disk: BlockDisk, key: str, slot: int | None, item: CacheItem) -> bool:
        if slot is not None and slot == len(self._layout.windows):
            return disk.offer_state(key, item.value)
        return disk.offer(key, self._packings[0 if slot is None else slot + 1], item.value)

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


def _disk_blocks(keys: Sequence[str], path: Sequence[BlockNode], size: int) -> list[DiskBlock]:
    """Return the full blocks with these names, of which `path` are in memory."""
    nodes = [*path, *([None] * (len(keys) - len(path)))]
    return [
        DiskBlock(start=at * size, stop=(at + 1) * size, key=key, node=node)
        for at, (key, node) in enumerate(zip(keys, nodes, strict=False))
    ]


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
