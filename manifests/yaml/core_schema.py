"""The core schema of YAML 1.2: the meaning of unquoted scalars, and plain values written as YAML. Pure.

`no`, `on` and `1_000` are texts, `012` is twelve. Writing is done here and not by a library: it is fast for thousands
of objects, and quotes every text that a YAML 1.1 reader would take for another type.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from manifests.trees import Tree

Scalar: TypeAlias = str | int | float | bool | None

# Python refuses to parse integers of more than 4300 digits; no known field needs this many.
_MAX_DIGITS = 100

_WORDS: Mapping[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INT = re.compile(r"[-+]?[0-9]+")
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")

# Words that YAML 1.1 readers take for booleans: quoted, so that every reader gets a text.
_RISKY = frozenset(("true", "false", "null", "yes", "no", "on", "off", "y", "n"))
_SAFE = re.compile(r"[A-Za-z/](?:[A-Za-z0-9_./@+-]|:(?=[A-Za-z0-9/])| (?=[A-Za-z0-9_./(]))*")


def resolve(text: str) -> Scalar:
    """Return the value of an unquoted scalar.

    Raises:
        ValueError: it is a number of too many digits.

    """
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text) or _BASED.fullmatch(text):
        if len(text) > _MAX_DIGITS:
            raise ValueError(f"is a number of {len(text)} digits")
        return int(text, 10 if _INT.fullmatch(text) else 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    found = _SPECIAL.fullmatch(text)
    if found is None:
        return text
    if found.group(3):
        return math.nan
    return -math.inf if found.group(1) == "-" else math.inf


def spell(value: Scalar) -> str:
    """Return the value as YAML with the same meaning in YAML 1.1 and 1.2."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, float):
        return _spell_float(value)
    if isinstance(value, int):
        return str(value)
    if _SAFE.fullmatch(value) and value.lower() not in _RISKY:
        return value
    return '"' + "".join(_escape(char) for char in value) + '"'


def _spell_float(value: float) -> str:
    if math.isnan(value):
        return ".nan"
    if math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    return repr(value)


def _escape(char: str) -> str:
    if char in '"\\':
        return f"\\{char}"
    if char.isprintable():
        return char
    if char in "\n\t":
        return "\\n" if char == "\n" else "\\t"
    code = ord(char)
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


_ORDER = ("apiVersion", "kind", "metadata", "spec", "status")

# A key on the same line as its value must be shorter than 1024 characters (YAML 1.2, 7.4.2).
_MAX_KEY = 500


def dump(tree: Tree) -> str:
    """Return the tree as one YAML document, with its fields in kubectl's order."""
    if isinstance(tree, dict):
        first = {key: tree[key] for key in _ORDER if key in tree}
        tree = {**first, **{key: value for key, value in tree.items() if key not in first}}
    return "".join(f"{line}\n" for line in _lines(tree, ""))


def _lines(tree: Tree, pad: str) -> Iterator[str]:
    if isinstance(tree, dict) and tree:
        yield from _mapping(tree, pad)
    elif isinstance(tree, list) and tree:
        for item in tree:
            yield from _item(item, pad)
    else:
        yield f"{pad}{_inline(tree)}"


def _mapping(tree: Mapping[str, Tree], pad: str) -> Iterator[str]:
    for key, value in tree.items():
        spelled = spell(key)
        is_long = len(spelled) >= _MAX_KEY
        head = f"{pad}? {spelled}\n{pad}:" if is_long else f"{pad}{spelled}:"
        if isinstance(value, dict | list) and value:
            yield head
            yield from _lines(value, pad if isinstance(value, list) and not is_long else f"{pad}  ")
        else:
            yield f"{head} {_inline(value)}"


def _item(item: Tree, pad: str) -> Iterator[str]:
    """Yield the lines of a list item; the first one follows the dash."""
    first, *rest = _lines(item, f"{pad}  ")
    yield f"{pad}- {first[len(pad) + 2 :]}"
    yield from rest


def _inline(value: Tree) -> str:
    if isinstance(value, dict):
        return "{}"
    if isinstance(value, list):
        return "[]"
    return spell(value)
