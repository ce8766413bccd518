"""The interface of grammar libraries: a compiler for each model and a matcher for each output."""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

TokenMask: TypeAlias = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class GrammarFault:
    """The reason why an output cannot be followed any further."""

    reason: str
    is_costly: bool
    """True if its text is too costly to match, which lies in the grammar; False after a forbidden token."""


class GrammarMatcher(Protocol):
    """One output's position in its grammar. Never raises: a fault concerns one output of a whole batch."""

    @property
    def fault(self) -> GrammarFault | None:
        """The reason why the output cannot be followed any further; None if it can."""
        ...

    def fill(self, row: TokenMask) -> None:
        """Write the mask of the allowed next tokens: bit `t % 32` of word `t // 32` is token t.

        At the end of the grammar, and after a fault, only end tokens are allowed. So there is always a token to choose.
        """
        ...

    def take(self, token: int) -> None:
        """Advance by an allowed token."""
        ...


class CompiledGrammar(Protocol):
    """A compiled grammar in memory; it has no use but to exist."""


class GrammarCompiler(Protocol):
    """Compiles grammars and makes matchers, for one model's vocabulary."""

    def prepare(self) -> None:
        """Load what is otherwise loaded at the first grammar.

        Raises:
            GrammarError: this model's tokenizer cannot be constrained.

        """
        ...

    def find(self, grammar: str) -> CompiledGrammar | None:
        """Return a compiled grammar that is in memory; None if it would have to be compiled."""
        ...

    def check(self, grammar: str) -> CompiledGrammar:
        """Compile a grammar, so that its matchers are cheap; callable from any thread.

        The result holds the compiled grammar in memory: as long as it lives, `matcher` compiles nothing.

        Raises:
            GrammarError: the grammar is invalid or too large.

        """
        ...

    def matcher(self, grammar: str) -> GrammarMatcher:
        """Return a matcher at the start of an output."""
        ...
