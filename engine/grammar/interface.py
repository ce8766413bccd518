"""What the batch needs of a grammar library, in its own words."""

from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

TokenMask: TypeAlias = npt.NDArray[np.uint32]


class GrammarMatcher(Protocol):
    """Where one output is in its grammar. Never raises: a fault is one output's, and a batch has many."""

    @property
    def fault(self) -> str | None:
        """Why the output can no longer be followed: a token that was not allowed, or too costly a text."""
        ...

    def fill(self, row: TokenMask) -> None:
        """Write which tokens may come next: bit `t % 32` of word `t // 32` is token t.

        At the end only ends may; after a fault too, so that there is always a token to choose.
        """
        ...

    def take(self, token: int) -> None:
        """Go on by a token that was allowed."""
        ...


class GrammarCompiler(Protocol):
    """What makes matchers. One a model: it knows the vocabulary."""

    def check(self, grammar: str) -> None:
        """Compile a grammar; what was checked makes its matchers at little cost, from any thread.

        Raises:
            GrammarError: it is wrong, or too large.

        """
        ...

    def matcher(self, grammar: str) -> GrammarMatcher:
        """Return a matcher at the start of a text."""
        ...
