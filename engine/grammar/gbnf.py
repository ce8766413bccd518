"""Translates llama.cpp's grammars (GBNF) into llguidance's Lark. Pure.

Source: llama.cpp, grammars/README.md. A rule of the result has one line; its name is a number, because GBNF's names may
have hyphens and capitals, which mean something else in Lark.
"""

import json
import re
from collections.abc import Iterator
from itertools import pairwise

from engine.errors import GrammarError

_DEFINITION = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_TOKEN = re.compile(
    r"""(?P<blank>\s+|\#[^\n]*)
    |(?P<text>"(?:\\.|[^"\\\n])*")
    |(?P<signs>\[(?:\\.|[^\]\\\n])+\])
    |(?P<defines>::=)
    |(?P<name>[A-Za-z0-9_-]+)
    |(?P<operator>[|()*+?]|\{\d{1,9}(?:,\d{0,9})?\})
    |(?P<any>\.)""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)")
_NAMED_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
# Signs that mean something in a class of Rust's `regex`, and nothing in one of GBNF.
_IN_CLASS = re.compile(r"\\.|[/\[&~]")


def is_gbnf(grammar: str) -> bool:
    """Return whether a grammar defines its rules with `::=`."""
    return _DEFINITION.search(grammar) is not None


def to_lark(grammar: str) -> str:
    """Return a grammar in Lark; its rule `root` becomes `start`.

    Raises:
        GrammarError: it is no GBNF; names the line.

    """
    tokens = list(_tokens(grammar))
    names = [token for token, after in pairwise(tokens) if after[0] == "defines"]
    for kind, text, line in names:
        if kind != "name":
            raise GrammarError(f"Line {line}: '{text[:50]}': '::=' follows the name of a rule.")
    rules = {
        name: "start" if name == "root" else f"rule{at}" for at, (_, name, _) in enumerate(names)
    }
    if "root" not in rules:
        raise GrammarError("There is no rule 'root', with which a grammar starts.")
    if len(rules) < len(names):
        raise GrammarError("A rule is defined twice.")
    return "".join(_written(tokens, rules)).lstrip("\n")


def _tokens(grammar: str) -> Iterator[tuple[str, str, int]]:
    """Yield the kind, the text and the line of each token, without blanks and comments."""
    at, line = 0, 1
    while at < len(grammar):
        found = _TOKEN.match(grammar, at)
        if found is None:
            raise GrammarError(f"Line {line}: '{grammar[at : at + 20]}' is not GBNF.")
        assert found.lastgroup is not None
        if found.lastgroup != "blank":
            yield found.lastgroup, found.group(), line
        line += found.group().count("\n")
        at = found.end()
    yield "end", "", line


def _written(tokens: list[tuple[str, str, int]], rules: dict[str, str]) -> Iterator[str]:
    for (kind, text, line), after in pairwise(tokens):
        match kind:
            case "name" if after[0] == "defines":
                yield f"\n{rules[text]}:"
            case "name":
                if text not in rules:
                    raise GrammarError(f"Line {line}: there is no rule '{text[:50]}'.")
                yield f" {rules[text]}"
            case "text":
                yield f" {json.dumps(_ESCAPE.sub(_unescape, text[1:-1]))}"
            case "signs":
                yield f" /[{_IN_CLASS.sub(_escape_in_class, text[1:-1])}]/"
            case "any":
                yield " /(?s:.)/"
            case "operator":
                yield f" {text}" if text in "|(" else text
            case _:
                pass


def _unescape(found: re.Match[str]) -> str:
    kind, digits = found.group()[1], found.group()[2:]
    if not digits:
        return _NAMED_ESCAPES.get(kind, kind)
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise GrammarError(f"'{found.group()}' is not a character.")
    return chr(code)


def _escape_in_class(found: re.Match[str]) -> str:
    text = found.group()
    return text if text.startswith("\\") else f"\\{text}"
