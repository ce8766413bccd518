"""Checks grammars that clients write, in Lark or in llama.cpp's GBNF, and returns them in llguidance's Lark. Pure.

llguidance bounds what a grammar costs. What it cannot bound is left out of the language here: embedded JSON schemas,
which have checks of their own (json_schema.py), references to other grammars, and texts that must match several regular
expressions at once, whose product is built in one step (pattern_limits.py).
"""

import re
from typing import Final

from engine.errors import GrammarError
from engine.grammar import gbnf

MAX_CHARACTERS: Final = 32_768
"""Most characters of a grammar."""
# Literals, in which any sign may occur: texts, regular expressions and comments.
_LITERAL = re.compile(
    r'"(?:\\.|[^"\\\n])*"i?|//[^\n]*|/(?:\\.|[^/\\\n])+/[a-z]*|<[^<>\s]{1,200}>', re.DOTALL
)
_FORBIDDEN = re.compile(r"%(?!ignore\b)\w*|&|@\w*")
_REASONS: Final = {
    "&": "a text may match one regular expression, not several; write one that says both",
    "@": "a grammar may not refer to another grammar",
    "%": "of the directives, only '%ignore' may be used; send a JSON schema as 'json'",
}


def to_lark(grammar: str) -> str:
    """Return a client's grammar in llguidance's Lark.

    A grammar with `::=` is GBNF; it starts with the rule `root`. Any other is Lark; it starts with the rule `start`.

    Raises:
        GrammarError: it is too long, or uses what is left out; names the line.

    """
    if len(grammar) > MAX_CHARACTERS:
        raise GrammarError(
            f"It has {len(grammar)} characters; a grammar may have {MAX_CHARACTERS}."
        )
    if gbnf.is_gbnf(grammar):
        return gbnf.to_lark(grammar)
    bare = _LITERAL.sub(lambda literal: "\n" * literal.group().count("\n"), grammar)
    found = _FORBIDDEN.search(bare)
    if found is not None:
        line = bare.count("\n", 0, found.start()) + 1
        raise GrammarError(f"Line {line}: '{found.group()[:50]}': {_REASONS[found.group()[0]]}.")
    return grammar
