"""The llguidance backend of interface.py. No other file imports the library.

The library limits its work by fuel, counted in steps and not in seconds, so all ranks of a group get the same result.
It never raises for a bad grammar but enters an error state; this module raises the error.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias
from weakref import WeakValueDictionary

import llguidance
import numpy as np

from engine.errors import GrammarError
from engine.grammar.interface import GrammarFault, TokenMask

SerializeTokenizer: TypeAlias = Callable[[], str]  # the tokenizer as `tokenizer.json`

# A grammar of 100,000 symbols compiles in 0.2 s on two shared cores, and a step takes 20 ms at most. A lexer state
# takes 1 to 2 kB, so 50,000 of them are 100 MB for one hostile output.
_MAX_SYMBOLS, _MAX_STATES = 100_000, 50_000
_CACHED_GRAMMARS = 32
"""Compiled grammars to cache beside those of running requests, for repeated schemas; each takes a few megabytes at most."""
_SENTENCE = 300
# Errors of the library that are limits of its work; `stop_reason` does not tell them from forbidden tokens.
_COSTLY = ("lexer error:", "parser error:")


@dataclass(slots=True, kw_only=True)
class LlgMatcher:
    """One output's position in its grammar; implements `GrammarMatcher`."""

    _matcher: llguidance.LLMatcher
    _mask_words: int
    _ends: tuple[int, ...]

    @property
    def fault(self) -> GrammarFault | None:
        """The reason why the output cannot be followed any further; None if it can."""
        if not self._matcher.is_error():
            return None
        reason = _shorten(self._matcher.get_error())
        return GrammarFault(reason, is_costly=reason.startswith(_COSTLY))

    def fill(self, row: TokenMask) -> None:
        """Write the mask of the allowed next tokens; after a fault, only end tokens."""
        if row.size == self._mask_words and row.flags.c_contiguous:
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        else:
            # The logits are longer than the vocabulary, or shorter (added tokens without weights).
            own = np.zeros(self._mask_words, dtype=np.uint32)
            self._matcher.unsafe_compute_mask_ptr(own.ctypes.data, own.nbytes)
            both = min(row.size, own.size)
            row[:both], row[both:] = own[:both], 0
        if self._matcher.is_error():
            row[:] = 0
            for end in self._ends:
                row[end // 32] |= np.uint32(1 << end % 32)

    def take(self, token: int) -> None:
        """Advance by a token."""
        self._matcher.consume_token(token)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class LlgGrammar:
    """A compiled grammar, at the start of an output; implements `CompiledGrammar`."""

    start: llguidance.LLMatcher


@dataclass(slots=True, kw_only=True)
class LlgCompiler:
    """Compiles grammars for one model; implements `GrammarCompiler`.

    The library's own copy of the vocabulary is made at first use (0.5 s for 49,152 tokens): most requests have no
    grammar, and the start of an engine should not wait for it.
    """

    serialized: SerializeTokenizer
    eos_ids: tuple[int, ...]
    _tokenizer: llguidance.LLTokenizer | None = None
    _living: WeakValueDictionary[str, LlgGrammar] = field(default_factory=WeakValueDictionary)
    """All compiled grammars that a request or the cache holds."""
    _cached: OrderedDict[str, LlgGrammar] = field(default_factory=OrderedDict)
    # Tokenizer threads check grammars while the worker makes matchers.
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def prepare(self) -> None:
        """Make the library's copy of the vocabulary.

        Raises:
            GrammarError: this model's tokenizer cannot be constrained.

        """
        with self._lock:
            self._vocabulary()

    def find(self, grammar: str) -> LlgGrammar | None:
        """Return a compiled grammar that a request or the cache holds."""
        with self._lock:
            llg_grammar = self._living.get(grammar)
            if llg_grammar is not None:
                self._cache(grammar, llg_grammar)
            return llg_grammar

    def check(self, grammar: str) -> LlgGrammar:
        """Compile and cache a grammar; the result holds it in memory beyond the cache.

        Raises:
            GrammarError: the grammar is invalid or too large, or nothing matches it.

        """
        return self._compiled(grammar)

    def matcher(self, grammar: str) -> LlgMatcher:
        """Return a matcher at the start of an output.

        Raises:
            GrammarError: for the reasons of `check`.

        """
        start = self._compiled(grammar).start.deep_copy()
        return LlgMatcher(_matcher=start, _mask_words=self._mask_words, _ends=self.eos_ids)

    @property
    def _mask_words(self) -> int:
        assert self._tokenizer is not None
        return -(-self._tokenizer.vocab_size // 32)

    def _compiled(self, grammar: str) -> LlgGrammar:
        llg_grammar = self.find(grammar)
        if llg_grammar is not None:
            return llg_grammar
        with self._lock:
            tokenizer = self._vocabulary()
        # Outside the lock: compiling takes up to a second, and the worker needs matchers meanwhile.
        compiled = LlgGrammar(self._compile(tokenizer, grammar))
        with self._lock:
            self._living[grammar] = compiled
            self._cache(grammar, compiled)
        return compiled

    def _cache(self, grammar: str, compiled: LlgGrammar) -> None:
        self._cached[grammar] = compiled
        self._cached.move_to_end(grammar)
        if len(self._cached) > _CACHED_GRAMMARS:
            self._cached.popitem(last=False)

    def _compile(self, tokenizer: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
        limits = llguidance.LLParserLimits(
            max_grammar_size=_MAX_SYMBOLS, max_lexer_states=_MAX_STATES, verbose_errors=False
        )
        compiled = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        # A schema that refers only to itself compiles, and then allows nothing.
        probe = compiled.deep_copy()
        if not probe.is_error():
            probe.compute_bitmask()
        if probe.is_error():
            raise GrammarError(_shorten(probe.get_error()))
        return compiled

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
    """Return a compiler; None for a tokenizer that cannot be written as `tokenizer.json`."""
    return None if serialized is None else LlgCompiler(serialized=serialized, eos_ids=eos_ids)


def _shorten(error: str) -> str:
    """Return the library's message without the grammar that it quotes."""
    lines: Iterable[str] = (line.strip() for line in error.splitlines())
    words = " ".join(line for line in lines if line and not _is_quote(line))
    _, _, bare = words.rpartition("failed to compile JSON schema: ")
    return bare[:_SENTENCE]


def _is_quote(line: str) -> bool:
    head, bar, _ = line.partition("|")
    return (bool(bar) and head.strip().isdecimal()) or set(line) == {"^"}
