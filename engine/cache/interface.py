"""The interface of the cache room: options, the prefix cache protocol and its statistics. Imports no mlx."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

LayerCache: TypeAlias = Any  # one of mlx-lm's caches, of one sequence; mlx-lm ships no types

BLOCK_TOKENS = 64
"""Tokens of a block of the prefix cache."""
ADAPTER_SALT = "adapter:"
"""Beginning of the salts of prompts whose keys and values depend on more than their tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvOptions:
    """A deployment's options for keys and values. Bits and window exclude each other."""

    bits: int | None = None
    """Bits a number; None keeps numbers as the model computes them."""
    window: int | None = None
    """Most tokens that layers look back; None leaves this to the model."""
    keep: int = 0
    """First tokens of a sequence that a window keeps, as a part of it."""


@dataclass(slots=True)
class DiskCacheStats:
    """Counters since the process began; `nbytes` is a current value."""

    written: int = 0
    """Blocks written."""
    read: int = 0
    """Blocks read and used."""
    dropped: int = 0
    """Blocks not written, because the disk was too slow or full."""
    damaged: int = 0
    """Files deleted because their checksum or content was wrong."""
    evicted: int = 0
    """Files deleted for lack of room."""
    nbytes: int = 0
    """Bytes of the folder's files, as last counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheStats:
    """Counters since the process began; `entries` and `nbytes` are current values."""

    lookups: int
    """Calls of `fetch`."""
    hits: int
    """Calls that found at least one token."""
    asked_tokens: int
    """Tokens looked up."""
    hit_tokens: int
    """Tokens found."""
    stored_bytes: int
    """Bytes copied into the cache."""
    evictions: int
    """Blocks, parts of blocks and states evicted for lack of room."""
    entries: int
    """Blocks held now."""
    nbytes: int
    """Bytes held now."""
    pinned_tokens: int = 0
    """Tokens that are never evicted."""
    disk: DiskCacheStats = field(default_factory=DiskCacheStats)


class PrefixCache(Protocol):
    """Caches of earlier prompts. Worker thread only.

    Prompts with different salts share nothing but pinned tokens: `match` and `fetch` find only what was stored with the
    same salt.
    """

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        ...

    @property
    def stats(self) -> PrefixCacheStats:
        """Statistics for metrics."""
        ...

    def summary(self, limit: int) -> list[str]:
        """Return the names of at most `limit` held blocks, last used first."""
        ...

    def match(self, tokens: Sequence[int], salt: str = "") -> int:
        """Return how many of the first tokens `fetch` would find; always less than all. Changes nothing."""
        ...

    def fetch(self, tokens: Sequence[int], salt: str = "") -> tuple[list[LayerCache], int]:
        """Return caches for one sequence, filled with its first tokens, and their number; the caller owns the caches."""
        ...

    def store(
        self,
        tokens: Sequence[int],
        caches: Sequence[LayerCache],
        salt: str = "",
        *,
        is_checkpoint: bool = True,
    ) -> None:
        """Store the values of these tokens, the first of a sequence, from its caches; the caller keeps the caches.

        `is_checkpoint` says that others will continue here: a prompt or an answer ends, or `plan_checkpoints` named it.
        """
        ...

    def plan_checkpoints(
        self, tokens: Sequence[int], salt: str = "", *, start: int, shared: int = 0
    ) -> tuple[int, ...]:
        """Return the positions behind `start` where `store` should make a checkpoint of this prompt, ascending.

        `shared` is the number of tokens with which other prompts will begin; 0 if it is not known.
        """
        ...

    def pin(self, tokens: Sequence[int]) -> None:
        """Never evict these tokens, as far as their full blocks are held, and keep them on disk before others."""
        ...

    def trim(self, limit_bytes: int) -> None:
        """Evict the least recently used items until at most this many bytes are held."""
        ...

    def close(self) -> None:
        """Drop everything in memory, and write what waits for the disk, for a few seconds at most."""
        ...
