"""What the batch needs of a prefix cache, in its own words.

What a deployment says of its caches. Values only; imports no mlx.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

LayerCache: TypeAlias = Any  # one of mlx-lm's caches, of one sequence; mlx-lm ships no types


class PrefixStats(Protocol):
    """What a prefix cache did since the process began; `nbytes` is now."""

    @property
    def lookups(self) -> int:
        """Calls of `fetch`."""
        ...

    @property
    def hits(self) -> int:
        """Those which found at least one token."""
        ...

    @property
    def asked_tokens(self) -> int:
        """Tokens that were looked up."""
        ...

    @property
    def hit_tokens(self) -> int:
        """Those of them that were there."""
        ...

    @property
    def evictions(self) -> int:
        """Blocks and parts of blocks forgotten for want of room."""
        ...

    @property
    def nbytes(self) -> int:
        """What it holds."""
        ...


class PrefixCache(Protocol):
    """Caches of prompts that were read before. In the worker's thread alone."""

    @property
    def nbytes(self) -> int:
        """What it holds."""
        ...

    @property
    def stats(self) -> PrefixStats:
        """What it did so far."""
        ...

    def summary(self, limit: int) -> list[str]:
        """Return the names of at most so many blocks of what is held, last used first."""
        ...

    def match(self, tokens: Sequence[int]) -> int:
        """Return how many of the first tokens `fetch` would bring; always less than all. Looks, and changes nothing."""
        ...

    def fetch(self, tokens: Sequence[int]) -> tuple[list[LayerCache], int]:
        """Return caches for one sequence, filled with its first tokens, and their number; they are the caller's."""
        ...

    def store(self, tokens: Sequence[int], caches: Sequence[LayerCache]) -> None:
        """Keep what one sequence's caches hold of these tokens, the first it has read; they stay the caller's."""
        ...

    def trim(self, limit_bytes: int) -> None:
        """Forget what was not used for longest until no more than this is held."""
        ...


BLOCK_TOKENS = 64
"""Tokens of a block of cached prefixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvOptions:
    """How keys and values are kept. The two do not go together."""

    bits: int | None = None
    """Bits a number; None: as the model computes them."""
    window: int | None = None
    """Tokens that layers look back at most; None: the model alone decides."""
