"""The interface of the cache room: options, the prefix cache protocol and its statistics. Imports no mlx."""

from dataclasses import dataclass, field
from typing import Any, TypeAlias

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
