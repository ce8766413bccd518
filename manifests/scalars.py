"""What an unquoted word of YAML 1.2 means, and how a value is spelled as one. Pure.

YAML 1.2's core schema: `no`, `on` and `1_000` are texts, `012` is twelve.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import TypeAlias

Scalar: TypeAlias = str | int | float | bool | None

# Python refuses to read integers of more than 4300 digits; nothing we know needs even this many.
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

# Words that YAML 1.1 readers take for booleans: quoted, so that every reader sees a text.
_RISKY = frozenset(("true", "false", "null", "yes", "no", "on", "off", "y", "n"))
_SAFE = re.compile(r"[A-Za-z/](?:[A-Za-z0-9_./@+-]|:(?=[A-Za-z0-9/])| (?=[A-Za-z0-9_./(]))*")


def resolve(text: str) -> Scalar:
    """Return what the unquoted text says.

    Raises:
        ValueError: it is a number beyond all measure.

    """
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text) or _BASED.fullmatch(text):
        if len(text) > _MAX_DIGITS:
            raise ValueError(f"is a number of {len(text)} digits")
        return int(text, 10 if _INT.fullmatch(text) else 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    return _special(text)


def _special(text: str) -> float | str:
    found = _SPECIAL.fullmatch(text)
    if found is None:
        return text
    if found.group(3):
        return math.nan
    return -math.inf if found.group(1) == "-" else math.inf


def spell(value: Scalar) -> str:
    """Return the value as YAML that means the same to YAML 1.1 and 1.2."""
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
