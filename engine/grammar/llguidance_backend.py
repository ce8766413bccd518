"""llguidance behind `port.py`: grammars over one model's tokenizer. The only file that knows the library.

Everything the library does is bounded by its own fuel, counted in steps and not in seconds, so that all ranks of
a group come to the same end. It never raises for a bad grammar: it goes into an error, which is raised here.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import llguidance
import numpy as np

from engine.errors import GrammarError
from engine.grammar.interface import TokenMask

SerializeTokenizer: TypeAlias = Callable[[], str]  # the tokenizer as `tokenizer.json`

# A grammar of 100,000 symbols takes 0.2 s to compile on two shared cores, and the steps 20 ms at most. A state
# of the lexer takes 1 to 2 kB: 50,000 are 100 MB, for one hostile output.
_MAX_SYMBOLS, _MAX_STATES = 100_000, 50_000
_CACHED_GRAMMARS = 32
"""Compiled grammars, for those who send the same schema again; each is at most some megabytes."""
_SENTENCE = 300


@dataclass(slots=True, kw_only=True)
class LlgMatcher:
    """One output's place in its grammar."""

    _matcher: llguidance.LLMatcher
    _words: int
    _ends: tuple[int, ...]

    @property
    def fault(self) -> str | None:
        """Why the text can no longer be followed: a token that was not allowed, or too costly a text."""
        return _shorten(self._matcher.get_error()) if self._matcher.is_error() else None

    def fill(self, row: TokenMask) -> None:
        """Write which tokens may come next; after a fault, only ends."""
        if row.size == self._words and row.flags.c_contiguous:
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        else:
            # The logits are longer than the tokenizer, or (with added tokens nobody trained) shorter.
            own = np.zeros(self._words, dtype=np.uint32)
            self._matcher.unsafe_compute_mask_ptr(own.ctypes.data, own.nbytes)
            both = min(row.size, own.size)
            row[:both], row[both:] = own[:both], 0
        if self._matcher.is_error():
            row[:] = 0
            for end in self._ends:
                row[end // 32] |= np.uint32(1 << end % 32)

    def take(self, token: int) -> None:
        """Go on by a token."""
        self._matcher.consume_token(token)


@dataclass(slots=True, kw_only=True)
class LlgCompiler:
    """Makes matchers for one model.

    The library's own copy of the vocabulary is made when it is needed first (0.5 s for 49,152 tokens): most
    requests have no grammar, and a start should not wait for it.
    """

    serialized: SerializeTokenizer
    eos_ids: tuple[int, ...]
    _tokenizer: llguidance.LLTokenizer | None = None
    _compiled: OrderedDict[str, llguidance.LLMatcher] = field(default_factory=OrderedDict)
    # Tokenizer threads check while the worker makes matchers.
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self, grammar: str) -> None:
        """Compile a grammar, and keep it for those who will want matchers.

        Raises:
            GrammarError: it is wrong, too large, or nothing matches it.

        """
        self._start(grammar)

    def matcher(self, grammar: str) -> LlgMatcher:
        """Return a matcher at the start of a text.

        Raises:
            GrammarError: as `check` does.

        """
        return LlgMatcher(_matcher=self._start(grammar), _words=self._words, _ends=self.eos_ids)

    @property
    def _words(self) -> int:
        assert self._tokenizer is not None
        return -(-self._tokenizer.vocab_size // 32)

    def _start(self, grammar: str) -> llguidance.LLMatcher:
        with self._lock:
            kept = self._compiled.get(grammar)
            if kept is not None:
                self._compiled.move_to_end(grammar)
                return kept.deep_copy()
            tokenizer = self._vocabulary()
        # Outside: it takes up to a second, in which the worker must be able to get its matchers.
        made = self._compile(tokenizer, grammar)
        with self._lock:
            self._compiled[grammar] = made
            if len(self._compiled) > _CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
            return made.deep_copy()

    def _compile(self, tokenizer: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
        limits = llguidance.LLParserLimits(
            max_grammar_size=_MAX_SYMBOLS, max_lexer_states=_MAX_STATES, verbose_errors=False
        )
        made = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        # A schema that refers to nothing but itself compiles, and then allows nothing.
        probe = made.deep_copy()
        if not probe.is_error():
            probe.compute_bitmask()
        if probe.is_error():
            raise GrammarError(_shorten(probe.get_error()))
        return made

    def _vocabulary(self) -> llguidance.LLTokenizer:
        if self._tokenizer is None:
            try:
                self._tokenizer = llguidance.LLTokenizer(
                    self.serialized(), eos_token=list(self.eos_ids)
                )
            except ValueError as error:
                message = f"This model's tokenizer cannot be constrained: {error}"
                raise GrammarError(message) from error
        return self._tokenizer


def make_compiler(
    serialized: SerializeTokenizer | None, eos_ids: tuple[int, ...]
) -> LlgCompiler | None:
    """Return what makes matchers; None for a tokenizer that cannot be written as `tokenizer.json`."""
    return None if serialized is None else LlgCompiler(serialized=serialized, eos_ids=eos_ids)


def _shorten(error: str) -> str:
    """Return the library's complaint without the grammar that it quotes."""
    lines: Iterable[str] = (line.strip() for line in error.splitlines())
    words = " ".join(line for line in lines if line and not _is_quote(line))
    _, _, bare = words.rpartition("failed to compile JSON schema: ")
    return bare[:_SENTENCE]


def _is_quote(line: str) -> bool:
    head, bar, _ = line.partition("|")
    return (bool(bar) and head.strip().isdecimal()) or set(line) == {"^"}
